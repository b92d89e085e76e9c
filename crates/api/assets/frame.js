// What all pages share: loading, failures, empty results, and reloading when something changes.

import { el, prose, swap } from "./dom.js";

// Minimum interval between reloads, because changes come in bursts.
const APART = 1500;

export function failed(error, again) {
  const hints = [el("p", { class: "strong" }, prose(error.message))];
  if (error.accepted) hints.push(el("p", {}, "Accepted: ", prose(error.accepted)));
  if (again) hints.push(el("button", { type: "button", on: { click: again } }, "Try again"));
  return el("div", { class: "state error", role: "alert" }, ...hints);
}

export const empty = (...text) => el("p", { class: "state" }, ...text);
export const loading = () => el("p", { class: "state", "aria-busy": "true" }, "Loading …");

// A part of a page that loads itself. `read` fetches data, `draw` renders it, `kinds` are the changes that reload it.
export class Part {
  #page;
  #read;
  #draw;
  #before = null;
  #last = 0;
  #timer = null;
  #busy = false;

  constructor(page, place, { read, draw, kinds = [] }) {
    this.#page = page;
    this.place = place;
    this.#read = read;
    this.#draw = draw;
    page.hear((kind, data) => {
      if (kind === "everything" || kinds.some((one) => one === kind || (typeof one === "function" && one(kind, data))))
        this.soon();
    });
    page.signal.addEventListener("abort", () => clearTimeout(this.#timer));
    swap(place, loading());
    this.now();
  }

  soon() {
    if (this.#timer || this.#page.signal.aborted) return;
    const wait = Math.max(0, this.#last + APART - Date.now());
    this.#timer = setTimeout(() => {
      this.#timer = null;
      this.now();
    }, wait);
  }

  async now() {
    if (this.#busy) {
      this.soon();
      return;
    }
    this.#busy = true;
    try {
      const data = await this.#read(this.#page.signal);
      if (this.#page.signal.aborted) return;
      const written = JSON.stringify(data);
      if (written !== this.#before) {
        this.#before = written;
        swap(this.place, this.#draw(data));
      }
      this.place.dispatchEvent(new CustomEvent("shown"));
    } catch (error) {
      if (error.name === "AbortError" || this.#page.signal.aborted) return;
      this.#before = null;
      this.#page.refused(error);
      swap(
        this.place,
        failed(error, () => this.now()),
      );
    } finally {
      this.#busy = false;
      this.#last = Date.now();
    }
  }
}

// A labelled choice whose value is stored in the address.
export function choice(page, name, label, options, usual, changed) {
  const value = page.query.get(name) ?? usual;
  const select = el(
    "select",
    { "data-key": name, name },
    ...options.map(([code, text]) => el("option", { value: code, selected: code === value }, text)),
  );
  select.addEventListener("change", () => {
    page.say(name, select.value === usual ? null : select.value);
    changed(select.value);
  });
  return el("label", { class: "choice" }, el("span", {}, label), select);
}

export function searchBox(page, name, label, hint, changed) {
  const input = el("input", {
    type: "search",
    name,
    "data-key": name,
    placeholder: hint,
    value: page.query.get(name) ?? "",
    spellcheck: "false",
    autocomplete: "off",
  });
  input.addEventListener("input", () => {
    page.say(name, input.value.trim() || null);
    changed(input.value.trim());
  });
  return el("label", { class: "choice grow" }, el("span", {}, label), input);
}

// A heading with the elements beside it.
export const section = (title, ...content) => el("section", { class: "card" }, el("h2", {}, title), ...content);
