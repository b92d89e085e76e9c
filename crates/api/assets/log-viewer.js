// Shows the log of a test and polls for new output while the test runs.

import { get } from "./api.js";
import { errorView } from "./components.js";
import { el, replaceContent } from "./dom.js";

const POLL_INTERVAL_MS = 2000;
// Longer logs lose their start here; the command line prints them in full.
const MAX_LENGTH = 400_000;

export function logViewer(page, { run, node, test }) {
  const output = el("pre", { class: "log", tabindex: "0", role: "log", "aria-label": `Log of ${test} on ${node}` });
  const status = el("p", { class: "dim", role: "status" }, "Loading …");
  const viewer = el("div", {}, status, output);
  let offset = null;
  const poll = async () => {
    if (page.signal.aborted || (offset !== null && !viewer.isConnected)) return;
    try {
      const chunk = await get(
        ["runs", run, "log"],
        offset === null ? { node, test, tail: 65536 } : { node, test, offset },
        page.signal,
      );
      const atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 8;
      offset = chunk.next_offset;
      if (chunk.text) output.append(chunk.text);
      if (output.textContent.length > MAX_LENGTH) output.textContent = output.textContent.slice(-MAX_LENGTH);
      if (atEnd) output.scrollTop = output.scrollHeight;
      status.textContent = chunk.ended ? (chunk.size ? "" : "The log is empty.") : "Live: new output appears here.";
      // How the job ended, if it left no complete result.
      if (chunk.ended && chunk.ending) {
        output.append(`== ${chunk.ending}\n`);
        status.textContent = "The run ended without a complete result.";
      }
      if (!chunk.ended) setTimeout(poll, chunk.text ? POLL_INTERVAL_MS / 2 : POLL_INTERVAL_MS);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.code === "gone" || error.status === 404) status.textContent = "No log: not written yet, or deleted.";
      else replaceContent(status, errorView(error, poll));
    }
  };
  poll();
  return viewer;
}
