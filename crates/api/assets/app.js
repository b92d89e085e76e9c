// The frame around the pages: routing, sign-in, and whether the data is live.
//
// Addresses are in the URL fragment, so that one document serves them all under any proxy path, and a link reproduces the view: page,
// filter, sort order and selection.

import { ACTIONS, order, signIn } from "./actions.js";
import { get } from "./api.js";
import { el, href, swap } from "./dom.js";
import { failed, loading } from "./frame.js";
import { Live } from "./live.js";
import { ageMoments, tellTime } from "./words.js";

const PAGES = [
  { path: "", title: "Fleet", load: () => import("./pages/fleet.js") },
  { path: "coverage", title: "Coverage", load: () => import("./pages/coverage.js") },
  { path: "cases", title: "Cases", load: () => import("./pages/cases.js") },
  { path: "tests", title: "Tests", load: () => import("./pages/tests.js") },
  { path: "plan", title: "Plan", load: () => import("./pages/plan.js") },
  { path: "budget", title: "Budget", load: () => import("./pages/budget.js") },
  { path: "audit", title: "Audit", load: () => import("./pages/audit.js") },
  { path: "nodes", title: "Node", hidden: true, load: () => import("./pages/node.js") },
];

const main = document.getElementById("main");
let page = null;
let who = null;

function where() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path
    .split("/")
    .filter(Boolean)
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
  return { parts, query: new URLSearchParams(query ?? "") };
}

// The context of a page: its address, its parameters, and change notifications. `signal` aborts when the page is left.
class Page {
  #ears = [];
  #end = new AbortController();
  #saying = 0;

  constructor({ parts, query }) {
    this.parts = parts;
    this.query = query;
    this.main = main;
    this.who = who;
    this.signal = this.#end.signal;
  }

  end() {
    clearTimeout(this.#saying);
    this.#end.abort();
  }

  hear(ear) {
    this.#ears.push(ear);
  }

  told(kind, data) {
    for (const ear of this.#ears) ear(kind, data);
  }

  // Stores a choice in the address, without adding a history entry.
  say(name, value) {
    if (value === null || value === "") this.query.delete(name);
    else this.query.set(name, value);
    // Delayed, because browsers are slow at this and throttle frequent calls.
    clearTimeout(this.#saying);
    this.#saying = setTimeout(() => history.replaceState(null, "", href(this.parts, Object.fromEntries(this.query))), 150);
  }

  title(text) {
    document.title = `${text} · Cluster Doctor`;
  }

  refused(error) {
    if (error.status === 401) askWho();
  }
}

let asking = false;
function askWho() {
  if (asking || document.querySelector("dialog[open]")) return;
  asking = true;
  signIn(() => {
    asking = false;
    start();
  });
  document.querySelector("dialog")?.addEventListener("close", () => (asking = false));
}

async function show() {
  if (location.hash === "#main") {
    main.focus();
    return;
  }
  page?.end();
  const at = where();
  const found = PAGES.find((one) => one.path === (at.parts[0] ?? ""));
  const mine = new Page(at);
  page = mine;
  for (const anchor of document.querySelectorAll("#nav a")) {
    if (anchor.dataset.path === found?.path) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  swap(main, loading());
  if (!found || (found.hidden && at.parts.length < 2)) {
    mine.title("Not found");
    swap(
      main,
      el(
        "div",
        { class: "state" },
        el("p", { class: "strong" }, "Page not found."),
        el("a", { href: "#/" }, "Go to the fleet"),
      ),
    );
    return;
  }
  mine.title(at.parts[1] ?? found.title);
  try {
    const { show: draw } = await found.load();
    if (!mine.signal.aborted) draw(mine);
  } catch (error) {
    if (!mine.signal.aborted) swap(main, failed(error, show));
  }
}

function drawTop() {
  swap(
    document.getElementById("nav"),
    ...PAGES.filter((one) => !one.hidden).map((one) =>
      el("a", { href: href(one.path ? [one.path] : []), "data-path": one.path }, one.title),
    ),
  );
  const whoButton = document.getElementById("who");
  whoButton.addEventListener("click", () => signIn(start));
  document.getElementById("pause").addEventListener("click", () => {
    const box = el(
      "dialog",
      { "aria-label": "Cluster commands" },
      el("h2", {}, "Cluster commands"),
      el(
        "div",
        { class: "buttons" },
        ...["pause", "resume", "close-breaker"].map((name) =>
          el(
            "button",
            {
              type: "button",
              on: {
                click: () => {
                  box.close();
                  order(name);
                },
              },
            },
            `${ACTIONS[name].title}…`,
          ),
        ),
      ),
    );
    box.addEventListener("close", () => box.remove());
    document.body.append(box);
    box.showModal();
  });
  theme();
}

function theme() {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => {
    button.textContent = dark() ? "☾" : "☀";
    button.setAttribute("aria-label", dark() ? "Dark mode: switch to light" : "Light mode: switch to dark");
  };
  const changed = () => {
    name();
    page?.told("theme", {});
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("doctor-theme", root.dataset.theme);
    } catch {
      // Without storage the choice lasts for this page.
    }
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  name();
}

let live = null;
function listen() {
  live?.stop();
  const sign = document.getElementById("live");
  live = new Live(
    (kind, data) => {
      page?.told(kind, data);
      if (kind === "plan" || kind === "everything") clock();
    },
    (connected) => {
      sign.textContent = connected ? "Live" : "Not live";
      sign.className = connected ? "live on" : "live off";
      sign.title = connected ? "Changes are shown as they happen" : "Connection lost; reconnecting";
    },
  );
  live.start();
}

// Updates the cluster's time from the controller.
async function clock() {
  try {
    tellTime((await get(["status"])).at);
    ageMoments();
  } catch {
    // The page itself reports the failure.
  }
}

async function start() {
  // The page below reports missing access.
  who = await get(["whoami"]).catch(() => null);
  document.getElementById("who").textContent = who?.known ? `${who.name} (${who.role})` : "Sign in";
  document.getElementById("pause").hidden = !who?.may_act;
  listen();
  // Ages use the local time until the cluster's is known.
  clock();
  show();
}

addEventListener("hashchange", show);
setInterval(() => ageMoments(), 30_000);
drawTop();
start();
