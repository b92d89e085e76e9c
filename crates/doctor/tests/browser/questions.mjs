// Measures how an on-call engineer finds the answers to five questions: clicks, keys, scrolls and seconds, from opening
// the dashboard until every part of the answer has been on the screen. Prints one line of JSON for each question.
//
//   BEFORE=1         acts as the pages of issue 19 need it; ASSETS names a copy of them
//   SHOTS=folder     writes a screenshot of each answer
//
// A part of an answer counts when it is visible without a scroll, which counts as an action of its own. Seconds are those
// of the script: loading and drawing, without the time in which a person reads.

import assert from "node:assert/strict";
import { mkdirSync } from "node:fs";

import { browser, cluster } from "./bed.mjs";

const { BEFORE, SHOTS } = process.env;
const WAIT = { timeout: 20_000 };

const doctor = await cluster({ nodes: 200, days: 14 });
const chrome = await browser();

// A user who acts, and counts.
class User {
  clicks = 0;
  keys = 0;
  scrolls = 0;

  constructor(page) {
    this.page = page;
  }

  async #reach(locator) {
    await locator.waitFor(WAIT);
    const isVisible = async () => {
      const [box, { height }] = [await locator.boundingBox(), this.page.viewportSize()];
      return box && box.y >= 0 && box.y + Math.min(box.height, 40) <= height;
    };
    if (await isVisible()) return;
    this.scrolls += 1;
    await locator.scrollIntoViewIfNeeded();
  }

  async click(locator) {
    await this.#reach(locator);
    this.clicks += 1;
    await locator.click();
  }

  async clickAt({ x, y }) {
    this.clicks += 1;
    await this.page.mouse.click(x, y);
  }

  async press(...keys) {
    for (const key of keys) {
      this.keys += 1;
      await this.page.keyboard.press(key);
    }
  }

  async see(...locators) {
    for (const locator of locators) await this.#reach(locator.first());
  }
}

// Where a node's cell is: a person sees the only one that is not pale.
const cellOf = (page, name) =>
  page.evaluate((name) => {
    const [map, box] = [document.querySelector(".map"), document.querySelector("canvas").getBoundingClientRect()];
    for (let y = box.top + 2; y < box.bottom; y += 5)
      for (let x = box.left + 2; x < box.right; x += 5) {
        map.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y }));
        if (document.querySelector(".tip strong")?.textContent === name) return { x, y };
      }
    throw new Error(`${name} has no cell`);
  }, name);

const { items: cases } = await doctor.get("cases?limit=500");
const map = await doctor.get("map");
const waiting = cases.find((item) => item.steps.at(-1)?.state === "proposed");
assert.ok(waiting, "no case waits for an operator");
const nodesByReason = new Map();
for (const [node, reason] of map.findings) nodesByReason.set(reason, (nodesByReason.get(reason) ?? new Set()).add(map.nodes[node][0]));
const [commonReason, sameNodes] = [...nodesByReason].sort((a, b) => b[1].size - a[1].size)[0];
const reason = map.reasons[commonReason];
const label = new RegExp(`^${reason.replaceAll("-", " ")} on ${sameNodes.size} node`, "i");

const nav = (page, name) => page.locator("#nav").getByRole("link", { name, exact: true });
const region = (page, name) => page.getByRole("region", { name });

const QUESTIONS = [
  {
    name: "wrong",
    question: "Is anything wrong right now?",
    // How many nodes fail, what waits for an operator, which tests miss their target.
    before: async (user, page) => {
      await user.see(page.locator(".facts", { hasText: "failing" }));
      await user.click(nav(page, "Cases"));
      await user.see(page.locator("tr", { hasText: waiting.node }));
      await user.click(nav(page, "Coverage"));
      await user.see(page.locator("tbody tr"));
    },
    after: async (user, page) => {
      await user.see(page.locator(".facts", { hasText: "failing" }), region(page, "Needs an operator").getByRole("listitem"));
      await user.see(region(page, "Open cases").getByRole("listitem"));
    },
  },
  {
    name: "why",
    question: `Why is ${waiting.node} out of service, and since when?`,
    before: async (user, page) => {
      await user.click(page.getByLabel("Filter"));
      await user.press(...waiting.node);
      await user.clickAt(await cellOf(page, waiting.node));
      await user.see(page.locator(".fact", { hasText: "In this state since" }), page.locator("p.strong"));
    },
    after: async (user, page) => {
      await page.locator("input[name=filter]").waitFor(WAIT);
      await user.press("/", ...waiting.node, "Enter");
      await user.see(page.locator(".fact", { hasText: "In this state since" }), page.locator("p.strong"));
    },
  },
  {
    name: "waits",
    question: "What waits for me, and what is the next command?",
    before: async (user, page) => {
      await user.click(nav(page, "Cases"));
      await user.click(page.locator("tr", { hasText: "proposed" }).locator("td[data-title=Node] a").first());
      await user.see(page.locator("section", { hasText: "What to do next" }).locator("code"));
    },
    after: async (user, page) => {
      await user.see(region(page, "Needs an operator").getByRole("listitem").locator("code"));
    },
  },
  {
    name: "same",
    question: `Which nodes have “${reason}”, and is it one rack or pool? (${sameNodes.size} nodes)`,
    before: async (user, page) => {
      await user.click(page.locator(".facts a", { hasText: label }));
      // The list of cases names no pool: each node's page does.
      for (const name of sameNodes) {
        await user.click(page.locator("td[data-title=Node]").getByRole("link", { name, exact: true }));
        await user.see(page.locator(".fact", { hasText: "Pool" }));
        if (name !== [...sameNodes].at(-1)) {
          user.clicks += 1;
          await page.goBack();
        }
      }
    },
    after: async (user, page) => {
      await user.click(page.locator(".summary a", { hasText: label }));
      await user.see(page.locator(".breakdown", { hasText: `gpu ${sameNodes.size}` }), page.locator("canvas"));
    },
  },
  {
    name: "validated",
    question: "Is the cluster validated, and if not, why?",
    before: async (user, page) => {
      await user.see(page.locator("h1", { hasText: "proven healthy" }));
      await user.click(nav(page, "Coverage"));
      await user.see(page.locator("tbody tr"));
      await user.click(nav(page, "Plan"));
      await user.see(page.locator("section", { hasText: "Skipped" }).locator("p.facts"));
    },
    after: async (user, page) => {
      await user.see(page.locator("h1", { hasText: "proven healthy" }), page.locator(".validation", { hasText: /stale|never tested|inconclusive|every/ }));
    },
  },
];

try {
  if (SHOTS) mkdirSync(SHOTS, { recursive: true });
  for (const { name, question, ...steps } of QUESTIONS) {
    const { page, close } = await chrome.open("about:blank");
    const user = new User(page);
    const began = performance.now();
    await page.goto(`${doctor.address}/`);
    await page.locator("canvas").waitFor(WAIT);
    await steps[BEFORE ? "before" : "after"](user, page);
    const seconds = Number(((performance.now() - began) / 1000).toFixed(2));
    const { clicks, keys, scrolls } = user;
    console.log(JSON.stringify({ version: BEFORE ? "before" : "after", question, clicks, keys, scrolls, seconds }));
    if (SHOTS) await page.screenshot({ path: `${SHOTS}/question-${name}.png` });
    await close();
  }
} finally {
  await chrome.stop();
  await doctor.stop();
}
