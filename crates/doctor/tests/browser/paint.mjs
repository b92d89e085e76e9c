// Measures the time until ten thousand nodes are painted, and until a hover or a filter takes effect; prints the worst
// of several as one line of JSON. The map counts as painted when the browser has finished the frame of the first
// complete drawing and begins the next but one, counted from the start of the navigation: users cannot point at what is
// not visible yet.

import assert from "node:assert/strict";

import { browser, cluster } from "./bed.mjs";

const { ADDRESS, NODES: said, DAYS } = process.env;
const NODES = Number(said ?? 10_000);
const TIMES = 5;

// In the page: measures from an event to the frame in which its effect is visible.
async function answers() {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const [map, tip, filter] = [
    document.querySelector(".map"),
    document.querySelector(".tip"),
    document.querySelector("[name=filter]"),
  ];
  const box = document.querySelector("canvas").getBoundingClientRect();
  const [hovers, filters] = [[], []];
  for (let n = 0; n < 40; n += 1) {
    const began = performance.now();
    const [x, y] = [box.x + 5 + ((n * 97) % (box.width - 10)), box.y + 25 + ((n * 61) % (box.height - 40))];
    map.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y }));
    await frame();
    hovers.push(performance.now() - began);
  }
  if (!tip.textContent) throw new Error("nothing was under the pointer");
  for (const text of ["node0", "node00", "health:fail", "*99", "state:in", ""]) {
    const began = performance.now();
    filter.value = text;
    filter.dispatchEvent(new InputEvent("input"));
    await frame();
    filters.push(performance.now() - began);
  }
  return { hovers, filters };
}

// An existing controller, or a demo started here.
const doctor = ADDRESS ? { address: ADDRESS, stop: async () => {} } : await cluster({ nodes: NODES, days: DAYS ?? 1 });
const chrome = await browser();
try {
  const [paints, hovers, filters] = [[], [], []];
  for (let turn = 0; turn < TIMES; turn += 1) {
    const { page, said, close } = await chrome.open(`${doctor.address}/`, {
      before: (page) =>
        page.addInitScript(() => {
          const frame = (then) => requestAnimationFrame(() => setTimeout(then));
          const painted = () => frame(() => frame(() => (globalThis.painted ??= performance.now())));
          new MutationObserver(() => Number(document.querySelector(".map")?.dataset.cells) > 0 && painted()).observe(document, {
            subtree: true,
            attributes: true,
            attributeFilter: ["data-cells"],
          });
        }),
    });
    await page.waitForFunction(() => globalThis.painted, null, { timeout: 60_000 });
    assert.equal(Number(await page.locator(".map").getAttribute("data-cells")), NODES);
    paints.push(await page.evaluate(() => globalThis.painted));
    const answered = await page.evaluate(answers);
    hovers.push(...answered.hovers);
    filters.push(...answered.filters);
    assert.deepEqual(said, []);
    await close();
  }
  const worst = (all) => Number(Math.max(...all).toFixed(1));
  console.log(
    JSON.stringify({
      nodes: NODES,
      first_paint_ms: worst(paints),
      hover_ms: worst([...hovers, ...filters]),
      hover_alone_ms: worst(hovers),
      filter_ms: worst(filters),
    }),
  );
} finally {
  await chrome.stop();
  await doctor.stop();
}
