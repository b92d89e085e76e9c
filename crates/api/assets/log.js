// The log of a test, followed while it runs.

import { get } from "./api.js";
import { el, swap } from "./dom.js";
import { failed } from "./frame.js";

const EVERY = 2000;
// The page keeps the end of a long log; the command line prints all of it.
const MOST = 400_000;

export function follow(page, { run, node, test }) {
  const text = el("pre", { class: "log", tabindex: "0", role: "log", "aria-label": `Log of ${test} on ${node}` });
  const state = el("p", { class: "dim", role: "status" }, "Loading …");
  const box = el("div", {}, state, text);
  let offset = null;
  const next = async () => {
    if (page.signal.aborted || (offset !== null && !box.isConnected)) return;
    try {
      const part = await get(
        ["runs", run, "log"],
        offset === null ? { node, test, tail: 65536 } : { node, test, offset },
        page.signal,
      );
      const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 8;
      offset = part.next_offset;
      if (part.text) text.append(part.text);
      if (text.textContent.length > MOST) text.textContent = text.textContent.slice(-MOST);
      if (atEnd) text.scrollTop = text.scrollHeight;
      state.textContent = part.ended ? (part.size ? "" : "The log is empty.") : "Live: new output appears here.";
      if (!part.ended) setTimeout(next, part.text ? EVERY / 2 : EVERY);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.code === "gone" || error.status === 404) state.textContent = "No log: not written yet, or deleted.";
      else swap(state, failed(error, next));
    }
  };
  next();
  return box;
}
