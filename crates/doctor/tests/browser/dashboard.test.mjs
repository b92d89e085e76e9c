// The dashboard in a real browser, over a real controller with a simulated cluster: each page with data, without, while
// loading and on errors; ten thousand nodes; keyboard only; dark mode; a phone; text that looks like markup; operator
// commands. SHOTS=folder writes screenshots for the guide.

import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { after, before, test } from "node:test";

import { browser, cluster, violations } from "./bed.mjs";
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
    ["fleet", "", ["status", "map", "tests"], "canvas"],
    ["fleet-table", "?view=table", ["status", "map", "tests"], "tbody tr"],
    ["attention", "attention", ["status"], "main h1"],
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
// Text that users see, without the spaces between elements.
const text = async (locator) => (await locator.innerText()).replace(/\s+/g, " ");
// Replaces fields of the status that the controller sends.
const withStatus = (fields) => (page) =>
  page.route(`${API}status`, async (route) => {
    const response = await route.fetch();
    await route.fulfill({ response, json: { ...(await response.json()), ...fields } });
  });
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

test("every page shows its data, logs nothing to the console and has no accessibility violation", async () => {
  for (const [name, path, , what] of pages) {
    const said = await seen(path, what, {}, async (page) => assert.deepEqual(await violations(page), [], name));
    assert.deepEqual(said, [], name);
  }
});

test("every page is readable in the dark and fits on a phone", async () => {
  for (const [name, path, , what] of pages) {
    const options = { colorScheme: "dark", viewport: { width: 390, height: 844 } };
    const said = await seen(path, what, options, async (page) => {
      // All other rules have the same result in light mode.
      assert.deepEqual(await violations(page, ["color-contrast"]), [], name);
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
    map: { ...map, nodes: [], findings: [] },
    status: { ...(await doctor.get("status")), attention: [] },
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
  await seen("", ".placeholder", { before: before_ }, async (page) => {
    await page.getByText("✓ No open problems.").waitFor(WAIT);
    await page.getByText("✓ No open cases.").waitFor(WAIT);
  });
});

test("ten thousand nodes are drawn, found under the pointer and filtered without a wait", async () => {
  const map = fleetOf(await doctor.get("map"), 10_000);
  const everywhere = { kind: "agents", urgency: "critical", nodes: map.nodes.map(([name]) => name), since: null, text: "agents are silent" };
  const before_ = async (page) => {
    await page.route(`${API}map`, answer(map));
    await withStatus({ attention: Array.from({ length: 200 }, () => ({ ...everywhere, next: null, case: null })) })(page);
  };
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
    assert.ok((await page.locator("*").count()) < 1500, "there are elements for every node");
    await page.getByLabel("Filter").fill("r002-*");
    await page.getByText("16 of 10,000 nodes · the filter hides 9,984").waitFor(WAIT);
    await page.waitForFunction(() => document.querySelector(".map").dataset.cells === "16", null, WAIT);
    await page.waitForURL(/filter=r002-/, WAIT);
    await page.getByLabel("View").selectOption("table");
    await page.getByLabel("Filter").fill("r00");
    await page.locator("tbody tr").nth(99).waitFor(WAIT);
    assert.equal(await page.locator("tbody tr").count(), 100, "a page of the table has a hundred rows");
  });
});

// What a controller says that wants attention: more than the first screen has room for.
const wanted = () => [
  {
    kind: "case",
    urgency: "critical",
    nodes: [broken.node],
    since: broken.opened,
    text: `${broken.node} waits for an operator: reset proposed`,
    next: `doctor repair ${broken.node} --step reset`,
    case: broken.id,
  },
  ...Array.from({ length: 8 }, (_, number) => ({
    kind: "coverage",
    urgency: number < 3 ? "warning" : "notice",
    nodes: ["node001", "node002"],
    since: null,
    text: `coverage of test ${number} is below its target`,
    next: null,
    case: null,
  })),
];

test("the first screen lists what needs an operator, most urgent first, with links, the next command and the number of the rest", async () => {
  const before_ = withStatus({ attention: wanted() });
  for (const colorScheme of ["light", "dark"]) {
    await seen("", "canvas", { before: before_, colorScheme }, async (page) => {
      const list = page.getByRole("region", { name: "Needs an operator" });
      await list.getByRole("listitem").nth(4).waitFor(WAIT);
      assert.equal(await list.getByRole("listitem").count(), 5);
      const first = list.getByRole("listitem").first();
      assert.match(await text(first), new RegExp(`Critical .*${broken.node} waits for an operator: reset proposed · .* ago · Case`));
      assert.equal(await first.locator("code").textContent(), `doctor repair ${broken.node} --step reset`);
      assert.equal(await first.getByRole("link", { name: broken.node }).getAttribute("href"), `#/nodes/${broken.node}`);
      assert.equal(await first.getByRole("link", { name: "Case" }).getAttribute("href"), `#/cases/${broken.id}`);
      // Nodes that the text does not name follow it.
      assert.match(await text(list.getByRole("listitem").nth(1)), /below its target · node001, node002/);
      assert.deepEqual(await violations(page), [], colorScheme);
      await list.getByRole("link", { name: "and 4 more" }).click();
      await page.getByRole("heading", { level: 1, name: "Attention" }).waitFor(WAIT);
      await page.locator("tbody tr").nth(8).waitFor(WAIT);
      assert.match(await text(page.locator("tbody tr").first()), /Critical/);
      assert.deepEqual(await violations(page), [], colorScheme);
    });
  }
});

test("an open case on the first screen says what, since when, why, what was done and what is next", async () => {
  const { items } = await doctor.get("cases");
  const [open] = items.filter((item) => item.findings.length > 0);
  assert.ok(open, "eight simulated days leave an open case");
  const cases = (page) => page.getByRole("region", { name: "Open cases" });
  const attention = [{ ...wanted()[0], nodes: [open.node], case: open.id, next: `doctor repair ${open.node} --step reboot` }];
  for (const [status, next] of [
    [{ attention }, `Next doctor repair ${open.node} --step reboot`],
    [{ attention: [] }, "Next "],
  ]) {
    await seen("", "canvas", { before: withStatus(status) }, async (page) => {
      const item = cases(page).getByRole("listitem").filter({ hasText: open.node });
      await item.waitFor(WAIT);
      const words = await text(item);
      assert.ok(words.includes(`Why ${open.findings[0].text}`), words);
      assert.match(words, /ago/);
      assert.match(words, /Done .*(\(.* ago\)|no step yet)/);
      assert.ok(words.includes(next), words);
      if (!status.attention.length) assert.ok(words.includes(open.steps.at(-1).text), words);
      await item.getByRole("link", { name: open.node }).click();
      await page.getByRole("heading", { level: 1, name: open.node }).waitFor(WAIT);
    });
  }
});

test("a filter hides the other nodes on the map and in the table, says how many, and is undone by one button", async () => {
  const { nodes } = await doctor.get("map");
  await seen("?filter=node00", "canvas", {}, async (page) => {
    await page.getByText(`9 of ${nodes.length} nodes · the filter hides ${nodes.length - 9}`).waitFor(WAIT);
    assert.equal(await page.locator(".map").getAttribute("data-cells"), "9");
    // Nothing is drawn below the nodes that match.
    assert.ok((await page.locator(".map").boundingBox()).height < 80);
    await page.getByText("Pool: gpu 9").waitFor(WAIT);
    await page.getByLabel("View").selectOption("table");
    await page.locator("tbody tr").first().waitFor(WAIT);
    assert.equal(await page.locator("tbody tr").count(), 9);
    await page.getByLabel("Filter").fill("there is none");
    await page.getByText("No nodes match the filter.").waitFor(WAIT);
    await page.getByRole("button", { name: "Show all" }).click();
    await page.getByText(`${nodes.length} nodes`, { exact: true }).waitFor(WAIT);
    assert.equal(await page.locator("tbody tr").count(), nodes.length);
    assert.equal(await page.getByLabel("Filter").inputValue(), "");
  });
});

test("links filter by state, reason, pool and check, the filter is in the address, and Back undoes it", async () => {
  const map = await doctor.get("map");
  const [node, reason, check] = map.findings[0];
  const name = map.nodes[node][0];
  const count = (place, value) => new Set(map.findings.filter((entry) => entry[place] === value).map(([row]) => row)).size;
  const total = map.nodes.length;
  const shown = (page, number) => page.getByText(number === total ? `${total} nodes` : `${number} of ${total} nodes`).first().waitFor(WAIT);
  await seen("?view=table", "tbody tr", {}, async (page) => {
    const row = page.locator("tbody tr").filter({ has: page.getByRole("link", { name, exact: true }) });
    await row.locator("td[data-title=Findings] a").first().click();
    await shown(page, count(1, reason));
    assert.ok(page.url().includes(`filter=${encodeURIComponent(`reason=${map.reasons[reason]}`)}`), page.url());
    await row.locator("td[data-title=Pool] a").click();
    await shown(page, count(1, reason));
    assert.match(decodeURIComponent(page.url()), /filter=reason=\S+\+pool=gpu/);
    await page.goBack();
    await page.goBack();
    await page.locator("tbody tr").nth(total - 1).waitFor(WAIT);
    await shown(page, total);
  });
  await seen(`nodes/${name}`, "tbody tr", {}, async (page) => {
    await page.getByRole("link", { name: map.checks[check], exact: true }).first().click();
    await page.locator("canvas").waitFor(WAIT);
    await shown(page, count(2, check));
    assert.equal(await page.getByLabel("Filter").inputValue(), `check=${map.checks[check]}`);
  });
  await seen("", "canvas", {}, async (page) => {
    const state = map.states[map.nodes[node][map.columns.indexOf("state")]];
    const link = page.locator(".summary a", { hasText: new RegExp(`^${state}`, "i") }).first();
    await link.click();
    assert.equal(await page.getByLabel("Filter").inputValue(), `state=${state}`);
    await page.getByText(/the filter hides \d+/).waitFor(WAIT);
  });
});

test("the table has failing nodes first, and a chosen order replaces that", async () => {
  const healths = async (page) => (await page.locator("td[data-title=Health]").allTextContents()).map((cell) => cell.split(" ").at(-1).toLowerCase());
  await seen("?view=table", "tbody tr", {}, async (page) => {
    const order = await healths(page);
    assert.equal(order[0], "fail");
    assert.equal(order.lastIndexOf("fail"), order.filter((health) => health === "fail").length - 1, order.join(" "));
    assert.equal(order.at(-1), "pass");
    await page.getByRole("button", { name: "Node", exact: true }).click();
    assert.equal(await page.locator("tbody tr td").first().textContent(), "node001");
  });
});

test("the key / focuses the search of a page, Escape leaves it, and Enter opens the only node", async () => {
  const focused = (page) => page.evaluate(() => document.activeElement.getAttribute("name"));
  await seen("", "canvas", {}, async (page) => {
    await page.keyboard.press("/");
    assert.equal(await focused(page), "filter");
    await page.keyboard.type(`/${broken.node}`);
    assert.equal(await page.getByLabel("Filter").inputValue(), `/${broken.node}`);
    await page.keyboard.press("Escape");
    assert.notEqual(await focused(page), "filter");
    assert.equal(await page.getByLabel("Filter").inputValue(), `/${broken.node}`, "the text stays");
    await page.keyboard.press("/");
    await page.keyboard.type(broken.node);
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { level: 1, name: broken.node }).waitFor(WAIT);
  });
  await seen("audit", "tbody tr", {}, async (page) => {
    await page.keyboard.press("/");
    assert.equal(await focused(page), "node");
  });
  await seen("budget", "svg.days", {}, async (page) => {
    await page.keyboard.press("/");
    await page.locator("input[name=filter]:focus").waitFor(WAIT);
  });
});

test("the focus moves in reading order: health, what needs an operator, cases, filter, nodes", async () => {
  await seen("", "canvas", { before: withStatus({ attention: wanted().slice(0, 2) }) }, async (page) => {
    await page.getByRole("region", { name: "Open cases" }).getByRole("listitem").first().waitFor(WAIT);
    const places = [];
    for (let presses = 0; presses < 80 && places.at(-1) !== "map"; presses += 1) {
      await page.keyboard.press("Tab");
      const place = await page.evaluate(() => {
        const { activeElement } = document;
        if (activeElement.classList.contains("map")) return "map";
        if (activeElement.name === "filter") return "filter";
        return activeElement.closest("section")?.getAttribute("aria-label") ?? "header";
      });
      if (place !== places.at(-1)) places.push(place);
    }
    assert.deepEqual(places, ["header", "Health", "Needs an operator", "Open cases", "filter", "Nodes", "map"]);
  });
});

test("every plot has numbers and a unit at its y axis", async () => {
  const axes = (page) =>
    page.locator("figure.chart:not(.lanes)").evaluateAll((charts) =>
      charts.map((chart) => {
        const ticks = [...chart.querySelectorAll(".y-axis span")];
        const plot = chart.querySelector("svg").getBoundingClientRect();
        return {
          title: chart.querySelector(".y-title span")?.textContent ?? "",
          texts: ticks.map((tick) => tick.textContent),
          places: ticks.map((tick) => tick.getBoundingClientRect()).map((box) => (box.top + box.bottom) / 2 - plot.top),
          left: ticks.every((tick) => tick.getBoundingClientRect().right <= plot.left),
          height: plot.height,
        };
      }),
    );
  for (const [path, what, unit] of [
    ["tests/nccl", "figure svg", /^nodes \d/],
    ["budget", "svg.days", /^node-hours \d/],
    [`nodes/${broken.node}`, ".measurement figure svg", /^(nodes|count|ratio) \d|^\S+ [\d.,]+ [kMGT]?(B\/s|op\/s|flop\/s|°C)/],
  ]) {
    for (const viewport of [
      { width: 1280, height: 800 },
      { width: 390, height: 844 },
    ]) {
      await seen(path, what, { viewport }, async (page) => {
        const found = await axes(page);
        assert.ok(found.length > 0, path);
        for (const { title, texts, places, left, height } of found) {
          assert.ok(texts.length >= 2, `${path}: ${texts}`);
          assert.match(`${title} ${texts.join(" ")}`, unit, path);
          assert.equal(new Set(texts).size, texts.length, `${path} repeats a number: ${texts}`);
          assert.ok(left && places.every((place) => place > -2 && place < height + 2), `${path}: numbers beside the plot`);
          // The numbers grow upwards.
          assert.deepEqual(places, [...places].sort((a, b) => b - a), path);
        }
      });
    }
  }
});

test("a simulated cluster has a DEMO banner on its pages, another cluster has none", async () => {
  for (const [name, path, , what] of pages.filter(([name]) => ["fleet", "budget", "node"].includes(name))) {
    await seen(path, what, {}, async (page) => {
      await page.locator("header").getByText("This cluster is simulated").waitFor(WAIT);
      assert.match(await page.title(), /^DEMO · /, name);
    });
  }
  await seen("", "canvas", { before: withStatus({ backend: "slurm" }) }, async (page) => {
    assert.ok(!(await text(page.locator("body"))).includes("simulated"));
    assert.match(await page.title(), /^Fleet/);
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
      const body = await response.json();
      return route.fulfill({ response, json: spoil(url.endsWith("/status") ? { ...body, attention: wanted() } : body, "") });
    });
  for (const [name, path, , what] of pages.filter(
    ([name]) => !["coverage", "test", "budget"].includes(name),
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
  const viewport = { width: 1280, height: 800 };
  const shoot = (name, path, what, options = {}) =>
    seen(path, what, { viewport, ...options }, async (page) => {
      // Cases are shown after the nodes, and the banner after the first status.
      if (what === "canvas") await page.getByRole("region", { name: "Open cases" }).locator("li, .good").first().waitFor(WAIT);
      await page.locator("header").getByText("DEMO").waitFor(WAIT);
      await page.screenshot({ path: `${process.env.SHOTS}/${name}.png` });
    });
  for (const [name, path, , what] of pages) await shoot(name, path, what);
  const [reason] = (await doctor.get("map")).reasons;
  await shoot("fleet-filtered", `?filter=${encodeURIComponent(`reason=${reason}`)}`, "canvas");
  await shoot("dark", "", "canvas", { colorScheme: "dark" });
  await shoot("phone", "?colour=age", "canvas", { viewport: { width: 390, height: 700 }, colorScheme: "dark" });
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
  // Behind the dialog: no message of the API, and a way back to the dialog.
  assert.equal(await text(page.locator("main")), "Signed out This controller shows its cluster to users with a token. Sign in");
  assert.equal(await page.locator(".live").textContent(), "");
  if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/sign-in.png` });
  await page.keyboard.press("Escape");
  await page.locator("main").getByRole("button", { name: "Sign in" }).click();
  await page.locator("dialog", { hasText: "Sign in" }).waitFor(WAIT);
  assert.deepEqual(await violations(page), []);
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
  assert.deepEqual(await violations(page), []);
  await page.getByRole("button", { name: "Confirm: hold" }).click();
  await page.locator("dialog", { hasText: "Done." }).waitFor(WAIT);
  await page.getByRole("button", { name: "Close" }).click();
  await page.locator("main", { hasText: "new fans" }).waitFor(WAIT);
  await page.goto(at("audit"));
  await page.locator("tbody tr", { hasText: "new fans" }).first().waitFor(WAIT);

  // A command names nodes only if a filter selects them, and never all.
  const named = async () => {
    await page.getByRole("button", { name: "Quarantine…" }).click();
    const names = await page.locator("dialog").getByLabel("Nodes").inputValue();
    await page.keyboard.press("Escape");
    return names;
  };
  await page.goto(at(""));
  await page.getByText("Filter to select nodes, or name them").waitFor(WAIT);
  assert.equal(await named(), "");
  await page.getByLabel("Filter").fill("node");
  assert.equal(await named(), "", "a filter that matches every node selects none");
  await page.getByLabel("Filter").fill("node00");
  await page.getByText("For 9 nodes shown:").waitFor(WAIT);
  assert.equal(await named(), Array.from({ length: 9 }, (_, number) => `node00${number + 1}`).join(" "));
  assert.deepEqual(await violations(page), []);
  await close();
});
