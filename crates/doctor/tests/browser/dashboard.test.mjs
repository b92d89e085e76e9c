// The dashboard in a real browser, over a real controller with a simulated cluster: each page with data, without, while
// loading and on errors; ten thousand nodes; keyboard only; dark mode; a phone; text that looks like markup; operator
// commands. SHOTS=folder writes screenshots for the guide.

import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { after, before, test } from "node:test";

import { browser, cluster, serious } from "./bed.mjs";
import { fleetOf } from "./fleet-of.mjs";

const API = "**/api/v1/";
const WAIT = { timeout: 20_000 };
let [doctor, chrome, broken] = [null, null, null];
let pages = [];

before(async () => {
  [doctor, chrome] = await Promise.all([cluster({ nodes: 60, days: 8 }), browser()]);
  const { items } = await doctor.get("cases?state=all&limit=1");
  broken = items[0];
  assert.ok(broken, "eight simulated days bring a case");
  // Every page: its name, path, API requests, and an element that is present when it has data.
  pages = [
    ["fleet", "", ["status", "map", "findings*", "tests"], "canvas"],
    ["fleet-table", "?view=table", ["status", "map", "findings*", "tests"], "tbody tr"],
    ["coverage", "coverage", ["coverage"], "tbody tr"],
    ["cases", "cases?state=all", ["cases*"], "tbody tr"],
    ["case", `cases/${broken.id}`, [`cases/${broken.id}`], "tbody tr"],
    ["tests", "tests", ["tests", "coverage"], "tbody tr"],
    ["test", "tests/nccl", ["tests/nccl*"], "figure svg"],
    ["plan", "plan", ["plan"], "tbody tr"],
    ["budget", "budget", ["budget*"], "svg.days"],
    ["audit", "audit", ["audit*"], "tbody tr"],
    [
      "node",
      `nodes/${broken.node}`,
      [`nodes/${broken.node}`, `nodes/${broken.node}/timeline*`, `nodes/${broken.node}/measurements`, "runs*"],
      "figure svg",
    ],
  ];
});

after(async () => {
  await chrome?.stop();
  await doctor?.stop();
});

const at = (path) => `${doctor.address}/#/${path}`;
const settled = (page) => page.waitForFunction(() => !document.querySelector("[aria-busy]"), null, WAIT);
const answer = (body) => (route) => route.fulfill({ contentType: "application/json", body: JSON.stringify(body) });

async function seen(path, what, options, look) {
  const opened = await chrome.open(at(path), options);
  try {
    await opened.page.locator(what).first().waitFor(WAIT);
    await settled(opened.page);
    await look?.(opened.page);
    return opened.said;
  } finally {
    await opened.close();
  }
}

test("every page shows its data, logs nothing to the console and has no serious accessibility violation", async () => {
  for (const [name, path, , what] of pages) {
    const said = await seen(path, what, {}, async (page) => assert.deepEqual(await serious(page), [], name));
    assert.deepEqual(said, [], name);
  }
});

test("every page is readable in the dark and fits on a phone", async () => {
  for (const [name, path, , what] of pages) {
    const options = { colorScheme: "dark", viewport: { width: 390, height: 844 } };
    const said = await seen(path, what, options, async (page) => {
      // All other rules have the same result in light mode.
      assert.deepEqual(await serious(page, ["color-contrast"]), [], name);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wide <= 0, `${name} is ${wide} px too wide`);
      const light = await page.evaluate(() =>
        getComputedStyle(document.documentElement)
          .backgroundColor.match(/\d+/g)
          .every((part) => part > 100),
      );
      assert.ok(!light, `${name} is not dark`);
    });
    assert.deepEqual(said, [], name);
  }
});

test("every page shows that it is loading and that loading failed, and retries on request", async () => {
  for (const [, path, places, what] of pages) {
    let let_go = null;
    const held = new Promise((go) => (let_go = go));
    let failing = true;
    const before_ = async (page) => {
      for (const place of places) {
        await page.route(API + place, async (route) => {
          await held;
          if (failing)
            await route.fulfill({
              status: 503,
              contentType: "application/json",
              body: JSON.stringify({ error: { code: "store", text: "the store does not respond", accepted: null, plan: null } }),
            });
          else await route.fallback();
        });
      }
    };
    const { page, close } = await chrome.open(at(path), { before: before_ });
    await page.locator("main [aria-busy]").first().waitFor(WAIT);
    let_go();
    await page.locator("main [role=alert]", { hasText: "the store does not respond" }).first().waitFor(WAIT);
    failing = false;
    while (await page.getByRole("button", { name: "Try again" }).count()) {
      const before_count = await page.getByRole("button", { name: "Try again" }).count();
      await page.getByRole("button", { name: "Try again" }).first().click();
      await page.waitForFunction(
        (count) => [...document.querySelectorAll("button")].filter((one) => one.textContent === "Try again").length < count,
        before_count,
        WAIT,
      );
    }
    await page.locator(what).first().waitFor(WAIT);
    await close();
  }
});

test("every page shows that the cluster has not been observed yet", async () => {
  const nothing = { items: [], next: null };
  const map = await doctor.get("map");
  const empty = {
    map: { ...map, nodes: [] },
    "findings*": nothing,
    "cases*": nothing,
    "audit*": nothing,
    "runs*": nothing,
    coverage: [],
    tests: [],
    plan: { at: "2026-11-01T00:00:00Z", actions: [], skipped: [] },
    "budget*": {
      since: "2026-11-01T00:00:00Z",
      until: "2026-11-01T00:00:00Z",
      node_hours_per_day: null,
      node_hours: 0,
      faults: 0,
      node_hours_per_fault: null,
      days: [],
    },
    "tests/nccl*": { test: "nccl", nodes: 0, read: 0, complete: true, coverage: null, measurements: [] },
    "nodes/*/timeline*": [],
    "nodes/*/measurements": [],
  };
  const before_ = async (page) => {
    for (const [place, body] of Object.entries(empty)) await page.route(API + place, answer(body));
  };
  for (const [name, path] of pages.filter(([name]) => name !== "case")) {
    const said = await seen(path, ".placeholder", { before: before_ });
    assert.deepEqual(said, [], name);
  }
});

test("ten thousand nodes are drawn, found under the pointer and filtered without a wait", async () => {
  const map = fleetOf(await doctor.get("map"), 10_000);
  const before_ = (page) => page.route(`${API}map`, answer(map));
  await seen("?group=rack", "canvas", { before: before_ }, async (page) => {
    await page.getByText("of 10,000 nodes proven healthy").waitFor(WAIT);
    await page.waitForFunction(() => document.querySelector(".map").dataset.cells === "10000", null, WAIT);
    await page.locator("canvas").hover({ position: { x: 12, y: 22 } });
    await page.locator(".tip strong", { hasText: "r001-node" }).waitFor(WAIT);
    // Measured in the page, from the event to the changed element, so that only the page's own time counts.
    const slowest = await page.evaluate(async () => {
      const [map_, tip, filter] = [
        document.querySelector(".map"),
        document.querySelector(".tip"),
        document.querySelector("[name=filter]"),
      ];
      const box = document.querySelector("canvas").getBoundingClientRect();
      const took = (act) => {
        const began = performance.now();
        act();
        void tip.getBoundingClientRect();
        return performance.now() - began;
      };
      const hover = (n) =>
        took(() =>
          map_.dispatchEvent(
            new PointerEvent("pointermove", {
              clientX: box.x + 5 + ((n * 97) % (box.width - 10)),
              clientY: box.y + 25 + ((n * 61) % (box.height - 40)),
            }),
          ),
        );
      const type = (text) =>
        took(() => {
          filter.value = text;
          filter.dispatchEvent(new InputEvent("input"));
        });
      // The minimum of a few attempts each, a frame apart, because other processes use the same cores.
      const least = async (act) => {
        const times = [];
        for (let turn = 0; turn < 5; turn += 1) {
          times.push(act(turn));
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        }
        return Math.min(...times);
      };
      const [hovers, filters] = [[], []];
      for (let n = 0; n < 10; n += 1) hovers.push(await least((turn) => hover(5 * n + turn)));
      for (const text of ["r0", "r01", "health:fail", "*99", ""]) filters.push(await least(() => type(text)));
      return { hover: Math.max(...hovers), filter: Math.max(...filters) };
    });
    // Only repeated passes over all nodes take this long. M17 measures the promised 50 ms on an idle machine.
    assert.ok(slowest.hover < 1000, `a hover took ${slowest.hover} ms`);
    assert.ok(slowest.filter < 1000, `a filter took ${slowest.filter} ms`);
    await page.getByLabel("Filter").fill("r002-*");
    await page.getByText("16 of 10,000 nodes").waitFor(WAIT);
    await page.waitForURL(/filter=r002-/, WAIT);
  });
});

test("the keyboard alone goes from the fleet to a node, and the table shows the same as the map", async () => {
  await seen("", "canvas", {}, async (page) => {
    await page.locator(".map").focus();
    for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"]) await page.keyboard.press(key);
    const name = await page.locator(".tip strong").textContent();
    assert.ok((await page.locator("[aria-live=polite]").textContent()).startsWith(name));
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { level: 1, name }).waitFor(WAIT);
    await page.keyboard.press("Tab");
    assert.equal(await page.evaluate(() => document.activeElement !== document.body), true);
  });
  await seen("?view=table&nodes.sort=-node", "tbody tr", {}, async (page) => {
    const { nodes } = await doctor.get("map");
    assert.equal(await page.locator("tbody tr").first().locator("td").first().textContent(), nodes.at(-1)[0]);
    assert.equal(await page.locator("tbody tr").count(), nodes.length);
  });
});

test("a map is coloured by any measurement of a test, and the choice is in the address", async () => {
  await seen("?colour=metric%3Anccl%2Fnic_bandwidth", "canvas", {}, async (page) => {
    await page.locator("select[name=metric]").waitFor(WAIT);
    assert.equal(await page.locator("select[name=metric]").inputValue(), "nic_bandwidth");
    await page.locator(".legend", { hasText: "GB/s" }).waitFor(WAIT);
    await page.locator("select[name=metric]").selectOption("allreduce_bandwidth");
    await page.waitForURL(/allreduce_bandwidth/, WAIT);
  });
});

test("a table is saved as CSV, and cells are not interpreted as formulas", async () => {
  const { items, next } = await doctor.get("audit?limit=200");
  items[0].text = '=HYPERLINK("x","y")';
  items[0].by = "@operator";
  await seen("audit", "tbody tr", { before: (page) => page.route(`${API}audit*`, answer({ items, next })) }, async (page) => {
    const [file] = await Promise.all([
      page.waitForEvent("download"),
      page.getByRole("button", { name: "Save as CSV" }).click(),
    ]);
    assert.equal(file.suggestedFilename(), "audit.csv");
    const lines = readFileSync(await file.path(), "utf8").split("\r\n");
    assert.equal(lines.length, items.length + 2);
    assert.ok(lines[0].startsWith("When,Who,What,Node"));
    assert.ok(lines[1].includes(`"'=HYPERLINK(""x"",""y"")"`) && lines[1].includes("'@operator"), lines[1]);
  });
});

test("severities are sorted by rank and exported as codes", async () => {
  const ranked = ["isolate", "reboot", "reset", "monitor"];
  const shuffled = ["reset", "monitor", "isolate", "reboot"];
  // A badge is a symbol and the code with a capital.
  const severities = async (page) =>
    (await page.locator("td[data-title=Severity] .badge").allTextContents()).map((text) => text.split(" ").at(-1).toLowerCase());
  const items = shuffled.map((severity) => ({ ...broken, severity }));
  await seen("cases", "tbody tr", { before: (page) => page.route(`${API}cases*`, answer({ items, next: null })) }, async (page) => {
    assert.deepEqual(await severities(page), ranked);
    const [file] = await Promise.all([
      page.waitForEvent("download"),
      page.getByRole("button", { name: "Save as CSV" }).click(),
    ]);
    const lines = readFileSync(await file.path(), "utf8").split("\r\n");
    assert.deepEqual(
      lines.slice(1, 5).map((line) => line.split(",")[0]),
      ranked,
    );
  });
  const whole = await doctor.get(`cases/${broken.id}`);
  const findings = shuffled.map((severity) => ({ ...whole.findings[0], severity }));
  const path = `cases/${broken.id}?findings.sort=severity`;
  const serve = (page) => page.route(`${API}cases/${broken.id}`, answer({ ...whole, findings }));
  await seen(path, "tbody tr", { before: serve }, async (page) => {
    assert.deepEqual(await severities(page), [...ranked].reverse());
  });
});

test("markup in names, reasons, evidence and logs stays text", async () => {
  const evil = `<img src=x onerror="window.hit=1"><script>window.hit=1</script>`;
  // Any text from the controller, except the values that pages depend on.
  const spoil = (value, key) => {
    if (Array.isArray(value)) return value.map((one) => spoil(one, key));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, spoil(one, name)]));
    const text = [
      "text",
      "why",
      "because",
      "reason",
      "evidence",
      "headline",
      "node",
      "hardware",
      "by",
      "code",
      "rule",
      "title",
      "what",
      "what_text",
      "occupancy_text",
    ].includes(key);
    return typeof value === "string" && text ? evil + value : value;
  };
  const before_ = (page) =>
    page.route(`${API}**`, async (route) => {
      const url = route.request().url();
      if (/\/(map|events|whoami)\b/.test(url)) return route.fallback();
      const response = await route.fetch();
      return route.fulfill({ response, json: spoil(await response.json(), "") });
    });
  for (const [name, path, , what] of pages.filter(
    ([name]) => !["fleet", "fleet-table", "coverage", "test", "budget"].includes(name),
  )) {
    await seen(path, what, { before: before_ }, async (page) => {
      assert.ok((await page.locator("main").textContent()).includes("<img src=x"), `${name} shows none of it`);
      assert.equal(
        await page.evaluate(() => document.querySelectorAll("main img, main script").length + (globalThis.hit ?? 0)),
        0,
        name,
      );
    });
  }
  await seen(`nodes/${broken.node}`, "td button", { before: before_ }, async (page) => {
    await page.locator("td[data-title=Logs] button").first().click();
    await page.locator("pre.log", { hasText: "<script>" }).waitFor(WAIT);
    assert.equal(await page.evaluate(() => globalThis.hit), undefined);
  });
});

test("changes are shown without a reload, and a lost connection is reported", async () => {
  const opened = await chrome.open(at("plan"));
  await opened.page.locator(".live.on").waitFor(WAIT);
  const at_ = () => opened.page.locator("h1 + p time").getAttribute("datetime");
  await opened.page.locator("h1 + p time").waitFor(WAIT);
  const first = await at_();
  await opened.page.waitForFunction(
    (before) => document.querySelector("h1 + p time")?.getAttribute("datetime") !== before,
    first,
    { timeout: 60_000 },
  );
  await opened.close();
  const cut = await chrome.open(at("plan"), { before: (page) => page.route(`${API}events`, (route) => route.abort()) });
  await cut.page.locator(".live.off", { hasText: "Not live" }).waitFor(WAIT);
  await cut.close();
});

test("a severity has its meaning as a tooltip, and the line below a table explains it", async () => {
  await seen("cases?state=all", "tbody tr", {}, async (page) => {
    const meaning = await page.locator("td[data-title=Severity] .badge").first().getAttribute("title");
    assert.ok(meaning, "a meaning");
    await page.locator("main p", { hasText: `: ${meaning}` }).first().waitFor(WAIT);
  });
  await seen(`cases/${broken.id}`, "tbody tr", {}, async (page) => {
    await page.locator(".facts", { hasText: `severity ${broken.severity}` }).waitFor(WAIT);
  });
});

test("screenshots for the guide are taken on request", { skip: !process.env.SHOTS }, async () => {
  mkdirSync(process.env.SHOTS, { recursive: true });
  for (const [name, path, , what] of pages.filter(([name]) => name !== "fleet-table")) {
    await seen(path, what, { viewport: { width: 1120, height: 700 } }, (page) =>
      page.screenshot({ path: `${process.env.SHOTS}/${name}.png` }),
    );
  }
  const phone = { viewport: { width: 390, height: 700 }, colorScheme: "dark" };
  await seen("?colour=age", "canvas", phone, (page) => page.screenshot({ path: `${process.env.SHOTS}/phone.png` }));
});

// Must be last: once a token exists, every request needs one.
test("an operator signs in, sees the plan, confirms it with a reason, and a viewer is offered no action", async () => {
  const make = (name, role) =>
    /doctor_token_\S+/.exec(doctor.doctor("token", "create", name, "--role", role, "--yes"))[0].replace(/[".,]+$/, "");
  const [viewer, operator] = [make("looks", "viewer"), make("acts", "operator")];
  const { page, close } = await chrome.open(at(`nodes/${broken.node}`));
  const signIn = async (token) => {
    await page.getByLabel("Token", { exact: true }).fill(token);
    await page.locator("dialog").getByRole("button", { name: "Sign in" }).click();
  };
  await page.locator("dialog", { hasText: "Sign in" }).waitFor(WAIT);
  await signIn("doctor_token_wrong");
  await page.locator("dialog [role=alert]", { hasText: "unknown, expired or revoked" }).waitFor(WAIT);
  await signIn(viewer);
  await page.getByRole("button", { name: "looks (viewer)" }).waitFor(WAIT);
  await page.getByRole("heading", { level: 1, name: broken.node }).waitFor(WAIT);
  assert.equal(await page.getByRole("button", { name: "Hold…" }).count(), 0);
  assert.equal(await page.evaluate(() => localStorage.length), 0, "the token is stored only for the tab");

  await page.getByRole("button", { name: "looks (viewer)" }).click();
  await signIn(operator);
  await page.getByRole("button", { name: "Hold…" }).click();
  await page.getByLabel("Why").fill("new fans");
  await page.getByRole("button", { name: "Show what would happen" }).click();
  await page.locator("dialog h3", { hasText: "What would happen" }).waitFor(WAIT);
  assert.deepEqual(await serious(page), []);
  await page.getByRole("button", { name: "Confirm: hold" }).click();
  await page.locator("dialog", { hasText: "Done." }).waitFor(WAIT);
  await page.getByRole("button", { name: "Close" }).click();
  await page.locator("main", { hasText: "new fans" }).waitFor(WAIT);
  await page.goto(at("audit"));
  await page.locator("tbody tr", { hasText: "new fans" }).first().waitFor(WAIT);
  await close();
});
