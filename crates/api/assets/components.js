// UI components that the pages share: loading, error and empty views, form fields, and sections that reload on events.

import { badge } from "./colours.js";
import { el, href, inlineCode, replaceContent } from "./dom.js";
import { withFilterTerm } from "./fleet-model.js";
import { severityRank } from "./format.js";

// Limits the rate of reloads, because events come in bursts.
const MIN_RELOAD_INTERVAL_MS = 1500;

export function errorView(error, retry) {
  const content = [el("p", { class: "strong" }, inlineCode(error.message))];
  if (error.accepted) content.push(el("p", {}, "Accepted: ", inlineCode(error.accepted)));
  if (retry) content.push(el("button", { type: "button", on: { click: retry } }, "Try again"));
  return el("div", { class: "placeholder error", role: "alert" }, ...content);
}

// Shown instead of a page until the user has signed in.
export function signInView(signIn) {
  return el(
    "div",
    { class: "placeholder" },
    el("h1", {}, "Signed out"),
    el("p", {}, "This controller shows its cluster to users with a token."),
    el("button", { type: "button", class: "primary", on: { click: signIn } }, "Sign in"),
  );
}

export const emptyView = (...text) => el("p", { class: "placeholder" }, ...text);
export const loadingView = () => el("p", { class: "placeholder", "aria-busy": "true" }, "Loading …");

// A link to the nodes on the fleet page that have this value of a filter key.
export const nodesLink = (key, value, content) =>
  el("a", { href: href([], { filter: withFilterTerm("", key, value) }), title: `Nodes with ${key} ${value}` }, content);

// A table column with the severity of each row, sorted by rank.
export const SEVERITY_COLUMN = {
  key: "severity",
  title: "Severity",
  value: (row) => row.severity,
  sortValue: (row) => severityRank(row.severity),
  cell: (row) => badge(row.severity),
};

// A section that loads its data and reloads it on events. `load` fetches the data, `render` returns its elements, `events` are the names of
// the events that reload it, or functions of name and data that return whether to reload.
export class LiveSection {
  #page;
  #load;
  #render;
  #rendered = null;
  #lastLoaded = 0;
  #timer = null;
  #loading = false;

  constructor(page, container, { load, render, events = [] }) {
    this.#page = page;
    this.container = container;
    this.#load = load;
    this.#render = render;
    page.onEvent((name, data) => {
      const matches = (event) => (typeof event === "function" ? event(name, data) : event === name);
      if (name === "everything" || events.some(matches)) this.scheduleReload();
    });
    page.signal.addEventListener("abort", () => clearTimeout(this.#timer));
    replaceContent(container, loadingView());
    this.reload();
  }

  scheduleReload() {
    if (this.#timer || this.#page.signal.aborted) return;
    const delay = Math.max(0, this.#lastLoaded + MIN_RELOAD_INTERVAL_MS - Date.now());
    this.#timer = setTimeout(() => {
      this.#timer = null;
      this.reload();
    }, delay);
  }

  async reload() {
    if (this.#loading) {
      this.scheduleReload();
      return;
    }
    this.#loading = true;
    try {
      const data = await this.#load(this.#page.signal);
      if (this.#page.signal.aborted) return;
      // The first response is rendered at once: only a reload needs a comparison.
      if (!this.#rendered || JSON.stringify(data) !== JSON.stringify(this.#rendered)) {
        this.#rendered = data;
        replaceContent(this.container, this.#render(data));
      }
    } catch (error) {
      if (error.name === "AbortError" || this.#page.signal.aborted) return;
      this.#rendered = null;
      if (this.#page.handleApiError(error)) return;
      replaceContent(
        this.container,
        errorView(error, () => this.reload()),
      );
    } finally {
      this.#loading = false;
      this.#lastLoaded = Date.now();
    }
  }
}

// A labelled select element whose value is stored in the URL.
export function selectField(page, name, label, options, defaultValue, onChange) {
  const value = page.query.get(name) ?? defaultValue;
  const select = el(
    "select",
    { "data-key": name, name },
    ...options.map(([code, text]) => el("option", { value: code, selected: code === value }, text)),
  );
  select.addEventListener("change", () => {
    page.setParam(name, select.value === defaultValue ? null : select.value);
    onChange(select.value);
  });
  return el("label", { class: "choice" }, el("span", {}, label), select);
}

// A labelled search input whose value is stored in the URL. The key `/` focuses it, Escape leaves it with its text.
export function searchField(page, name, label, placeholder, onChange) {
  const input = el("input", {
    type: "search",
    name,
    "data-key": name,
    "aria-keyshortcuts": "/",
    placeholder,
    value: page.query.get(name) ?? "",
    spellcheck: "false",
    autocomplete: "off",
  });
  input.addEventListener("input", () => {
    page.setParam(name, input.value.trim() || null);
    onChange(input.value.trim());
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    // By default, Escape would delete the text.
    event.preventDefault();
    page.main.focus({ preventScroll: true });
  });
  const hint = el("kbd", { "aria-hidden": "true" }, "/");
  return el("label", { class: "choice grow" }, el("span", {}, label, " ", hint), input);
}

// A card with a heading.
export const section = (title, ...content) => el("section", { class: "card" }, el("h2", {}, title), ...content);
