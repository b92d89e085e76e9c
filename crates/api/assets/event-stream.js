// Client of the event stream (server-sent events). EventSource cannot send a token, so this class reads the stream with fetch. It resumes
// after the last event, and reconnects with exponential backoff.

import { apiUrl, requestHeaders } from "./api.js";

const MIN_RETRY_MS = 2000;
const MAX_RETRY_MS = 30_000;

export class EventStream {
  #onEvent;
  #onConnection;
  #lastEventId = null;
  #abortController = new AbortController();
  #retryMs = MIN_RETRY_MS;

  // `onEvent` receives the name and data of each event, `onConnection` whether the stream is connected, or the status 401: then the
  // stream ends until it is started anew.
  constructor(onEvent, onConnection) {
    this.#onEvent = onEvent;
    this.#onConnection = onConnection;
  }

  async start() {
    const { signal } = this.#abortController;
    let disconnected = false;
    while (!signal.aborted) {
      try {
        const resume = this.#lastEventId ? { "last-event-id": this.#lastEventId } : {};
        const response = await fetch(apiUrl(["events"]), { headers: requestHeaders(resume), signal, cache: "no-store" });
        if (response.status === 401) {
          this.#onConnection(false, response.status);
          return;
        }
        if (!response.ok) throw new Error(String(response.status));
        this.#onConnection(true);
        this.#retryMs = MIN_RETRY_MS;
        // Without a last event id the server cannot replay what was missed, so reload everything.
        if (disconnected && !this.#lastEventId) this.#onEvent("everything", {});
        await this.#read(response.body.getReader());
      } catch {
        // Reported below, unless this side has ended the stream.
      }
      if (signal.aborted) return;
      disconnected = true;
      this.#onConnection(false);
      await new Promise((done) => setTimeout(done, this.#retryMs));
      this.#retryMs = Math.min(this.#retryMs * 2, MAX_RETRY_MS);
    }
  }

  stop() {
    this.#abortController.abort();
  }

  async #read(reader) {
    const decoder = new TextDecoder();
    let buffer = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += decoder.decode(value, { stream: true });
      const frames = buffer.split("\n\n");
      buffer = frames.pop();
      for (const frame of frames) this.#dispatch(frame);
    }
  }

  #dispatch(frame) {
    const fields = Object.fromEntries(
      frame
        .split("\n")
        .filter((line) => !line.startsWith(":"))
        .map((line) => {
          const colon = line.indexOf(":");
          return colon < 0 ? [line, ""] : [line.slice(0, colon), line.slice(colon + 1).trimStart()];
        }),
    );
    if (fields.id) this.#lastEventId = fields.id;
    if (!fields.event) return;
    let data = {};
    try {
      data = JSON.parse(fields.data ?? "{}");
    } catch {
      // The event signals a change even if its data cannot be parsed.
    }
    this.#onEvent(fields.event === "dropped" ? "everything" : fields.event, data);
  }
}
