// The environment of the browser tests: the built program with a simulated cluster, and Debian's Chromium.
//
//   DOCTOR    the program            CHROMIUM  the browser            MODULES  the directory of playwright-core and axe-core
//   ASSETS    a copy of crates/api/assets whose pages are used instead of those in the program

import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

const need = (name) => {
  if (!process.env[name]) throw new Error(`${name} is not set: these tests are started by scripts/browser.sh`);
  return process.env[name];
};
const require_ = createRequire(join(need("MODULES"), "x.js"));
const { chromium } = require_("playwright-core");
const AXE = readFileSync(require_.resolve("axe-core/axe.min.js"), "utf8");

// Serves a simulated cluster until `stop`.
export async function cluster({ nodes, days, speed = 60 }) {
  const folder = mkdtempSync(join(tmpdir(), "doctor-browser-"));
  const store = join(folder, "demo", "doctor.db");
  const args = [
    "demo",
    "--nodes",
    nodes,
    "--days",
    days,
    "--quiet",
    "--serve",
    "--listen",
    "127.0.0.1:0",
    "--speed",
    speed,
    "--dir",
    join(folder, "demo"),
    "--json",
  ];
  const child = spawn(need("DOCTOR"), args.map(String), { stdio: ["ignore", "pipe", "inherit"], cwd: folder });
  const ended = once(child, "exit");
  let address = null;
  for await (const line of createInterface({ input: child.stdout })) {
    address = /"url":\s*"(http:[^"]*?)\/?(?:api\/v1\/)?"/.exec(line)?.[1];
    if (address) break;
  }
  if (!address) throw new Error("the output has no URL");
  return {
    address,
    // Runs a command on the same store.
    doctor: (...words) => {
      const { status, stdout, stderr } = spawnSync(need("DOCTOR"), [...words, "--store", store], {
        encoding: "utf8",
        cwd: folder,
      });
      if (status !== 0) throw new Error(`doctor ${words.join(" ")}: ${stderr}`);
      return stdout;
    },
    get: async (path) => (await fetch(`${address}/api/v1/${path}`)).json(),
    stop: async () => {
      child.kill("SIGTERM");
      await ended;
      rmSync(folder, { recursive: true, force: true });
    },
  };
}

const TYPES = { js: "text/javascript", css: "text/css", svg: "image/svg+xml", html: "text/html" };

// Answers requests for the pages from ASSETS.
async function useAssets(page) {
  await page.route(
    (url) => url.pathname === "/" || url.pathname.startsWith("/assets/"),
    async (route) => {
      const name = new URL(route.request().url()).pathname.replace(/^\/(assets\/)?/, "") || "index.html";
      const file = join(process.env.ASSETS, name);
      if (!existsSync(file)) return route.fulfill({ status: 404 });
      return route.fulfill({ contentType: TYPES[name.split(".").at(-1)], body: readFileSync(file, "utf8") });
    },
  );
}

// Starts a browser. Pages are opened together with their console messages.
export async function browser() {
  const args = process.getuid() === 0 ? ["--no-sandbox"] : [];
  const program = await chromium.launch({ executablePath: need("CHROMIUM"), args });
  return {
    // `before` may replace network responses with Playwright's `route`.
    open: async (url, { before = async () => {}, ...options } = {}) => {
      const context = await program.newContext({ viewport: { width: 1280, height: 800 }, ...options });
      const page = await context.newPage();
      const said = [];
      page.on("console", (message) => ["error", "warning"].includes(message.type()) && said.push(message.text()));
      page.on("pageerror", (error) => said.push(String(error)));
      if (process.env.ASSETS) await useAssets(page);
      await before(page);
      await page.goto(url);
      // A response that is being replaced must not outlive its page.
      const close = async () => {
        await page.unrouteAll({ behavior: "wait" });
        await context.close();
      };
      return { page, said, close };
    },
    stop: () => program.close(),
  };
}

// Returns the findings of the accessibility checker, for all rules or some. The debugger injects the checker, so the
// page's content security policy does not apply to it.
export async function violations(page, rules = null) {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate((rules) => globalThis.axe.run(document, rules ? { runOnly: rules } : {}), rules);
  return violations.map(
    ({ id, nodes }) =>
      `${id}: ${nodes
        .slice(0, 3)
        .map((node) => node.html.slice(0, 160))
        .join(" | ")}`,
  );
}
