// The application shell: routing, sign-in, theme, keys and event stream.
//
// Routes are in the URL fragment, so that one document serves all of them under any proxy path. A link reproduces the view: page, filter,
// sort order and selection.

import { ACTIONS, openActionDialog, openSignInDialog } from "./actions.js";
import { get } from "./api.js";
import { errorView, loadingView, signInView } from "./components.js";
import { el, href, replaceContent } from "./dom.js";
import { EventStream } from "./event-stream.js";
import { setClusterTime, updateAges } from "./format.js";

const PAGES = [
  { path: "", title: "Fleet", load: () => import("./pages/fleet.js") },
  { path: "attention", title: "Attention", load: () => import("./pages/attention.js") },
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
let user = null;
let isDemo = false;
// Set by the key `/` on a page without a search field: the fleet focuses its own.
let focusSearch = false;

function parseHash() {
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

// The context of a page: its path, its query parameters and its event listeners. `signal` aborts when the user leaves the page.
class Page {
  #listeners = [];
  #abortController = new AbortController();
  #urlTimer = 0;

  constructor({ parts, query }) {
    this.parts = parts;
    this.query = query;
    this.main = main;
    this.user = user;
    this.focusSearch = focusSearch;
    focusSearch = false;
    this.signal = this.#abortController.signal;
  }

  dispose() {
    clearTimeout(this.#urlTimer);
    this.#abortController.abort();
  }

  onEvent(listener) {
    this.#listeners.push(listener);
  }

  emit(name, data) {
    for (const listener of this.#listeners) listener(name, data);
  }

  // Sets a query parameter in the URL without adding a history entry; null removes it.
  setParam(name, value) {
    if (value === null || value === "") this.query.delete(name);
    else this.query.set(name, value);
    // Debounced, because browsers throttle frequent history changes.
    clearTimeout(this.#urlTimer);
    this.#urlTimer = setTimeout(() => history.replaceState(null, "", href(this.parts, Object.fromEntries(this.query))), 150);
  }

  // Sets query parameters with a history entry, so that the browser's Back undoes it.
  pushParams(params) {
    clearTimeout(this.#urlTimer);
    for (const [name, value] of Object.entries(params)) {
      if (value) this.query.set(name, value);
      else this.query.delete(name);
    }
    history.pushState(null, "", href(this.parts, Object.fromEntries(this.query)));
  }

  setTitle(text) {
    this.title = text;
    document.title = `${isDemo ? "DEMO · " : ""}${text} · Cluster Doctor`;
  }

  // Returns whether the page needs no error message of its own.
  handleApiError(error) {
    if (error.status !== 401) return false;
    // Every section of the page would report the same.
    this.dispose();
    // Nothing is shown that could be live. Signing in starts the stream again.
    stopEventStream();
    replaceContent(main, signInView(promptSignIn));
    promptSignIn();
    return true;
  }
}

let signInOpen = false;
function promptSignIn() {
  if (signInOpen || document.querySelector("dialog[open]")) return;
  signInOpen = true;
  openSignInDialog(() => {
    signInOpen = false;
    start();
  });
  document.querySelector("dialog")?.addEventListener("close", () => (signInOpen = false));
}

async function navigate() {
  if (location.hash === "#main") {
    main.focus();
    return;
  }
  page?.dispose();
  const target = parseHash();
  const route = PAGES.find(({ path }) => path === (target.parts[0] ?? ""));
  const nextPage = new Page(target);
  page = nextPage;
  for (const anchor of document.querySelectorAll("#nav a")) {
    if (anchor.dataset.path === route?.path) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  replaceContent(main, loadingView());
  if (!route || (route.hidden && target.parts.length < 2)) {
    nextPage.setTitle("Not found");
    replaceContent(
      main,
      el(
        "div",
        { class: "placeholder" },
        el("p", { class: "strong" }, "Page not found."),
        el("a", { href: "#/" }, "Go to the fleet"),
      ),
    );
    return;
  }
  nextPage.setTitle(target.parts[1] ?? route.title);
  try {
    const { render } = await route.load();
    if (!nextPage.signal.aborted) render(nextPage);
  } catch (error) {
    if (!nextPage.signal.aborted) replaceContent(main, errorView(error, navigate));
  }
}

function renderHeader() {
  replaceContent(
    document.getElementById("nav"),
    ...PAGES.filter((route) => !route.hidden).map((route) =>
      el("a", { href: href(route.path ? [route.path] : []), "data-path": route.path }, route.title),
    ),
  );
  const userButton = document.getElementById("user");
  userButton.addEventListener("click", () => openSignInDialog(start));
  document.getElementById("pause").addEventListener("click", () => {
    const dialog = el(
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
                  dialog.close();
                  openActionDialog(name);
                },
              },
            },
            `${ACTIONS[name].title}…`,
          ),
        ),
      ),
    );
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  });
  initThemeButton();
}

function initThemeButton() {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const updateButton = () => {
    button.textContent = isDark() ? "☾" : "☀";
    button.setAttribute("aria-label", isDark() ? "Dark mode: switch to light" : "Light mode: switch to dark");
  };
  const onThemeChange = () => {
    updateButton();
    page?.emit("theme", {});
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("doctor-theme", root.dataset.theme);
    } catch {
      // Without local storage the choice lasts until the page is closed.
    }
    onThemeChange();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onThemeChange);
  updateButton();
}

let eventStream = null;
function stopEventStream() {
  eventStream?.stop();
  const indicator = document.getElementById("live");
  indicator.textContent = indicator.title = "";
  indicator.className = "live";
}

function connectEventStream() {
  stopEventStream();
  const indicator = document.getElementById("live");
  eventStream = new EventStream(
    (name, data) => {
      page?.emit(name, data);
      if (name === "plan" || name === "everything") syncClock();
    },
    (connected, status) => {
      if (status === 401) {
        page?.handleApiError({ status });
        return;
      }
      indicator.textContent = connected ? "Live" : "Not live";
      indicator.className = connected ? "live on" : "live off";
      indicator.title = connected ? "Changes are shown as they happen" : "Connection lost; reconnecting";
    },
  );
  eventStream.start();
}

// Reads the cluster's time from the controller, and whether the cluster is simulated.
async function syncClock() {
  try {
    const { at, backend } = await get(["status"]);
    setClusterTime(at);
    updateAges();
    isDemo = backend === "sim";
    document.getElementById("demo").hidden = !isDemo;
    page?.setTitle(page.title);
  } catch {
    // The page reports the failure.
  }
}

// `/` focuses the search field of the page, or that of the fleet.
function onKey(event) {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, textarea, select, [contenteditable]")) return;
  event.preventDefault();
  const input = main.querySelector("input[type=search]");
  if (input) {
    input.focus();
    input.select();
  } else {
    focusSearch = true;
    if (location.hash.replace(/^#\/?/, "") === "") navigate();
    else location.hash = href([]);
  }
}

async function start() {
  // On failure the page reports that access is denied.
  user = await get(["whoami"]).catch(() => null);
  document.getElementById("user").textContent = user?.known ? `${user.name} (${user.role})` : "Sign in";
  document.getElementById("pause").hidden = !user?.may_act;
  connectEventStream();
  // Until the first response, ages use the browser's clock.
  syncClock();
  navigate();
}

addEventListener("hashchange", navigate);
addEventListener("keydown", onKey);
setInterval(() => updateAges(), 30_000);
renderHeader();
start();
