// The event stream. EventSource cannot send a token, so the stream is read here. It resumes after the last event; a lost connection is
// shown and retried with growing delays.

import { address, headers } from "./api.js";

const SHORTEST = 2000;
const LONGEST = 30_000;

export class Live {
  #hear;
  #tell;
  #last = null;
  #stop = new AbortController();
  #wait = SHORTEST;

  // `hear` receives the name and data of each event, `tell` whether the stream is connected.
  constructor(hear, tell) {
    this.#hear = hear;
    this.#tell = tell;
  }

  async start() {
    const { signal } = this.#stop;
    let missed = false;
    while (!signal.aborted) {
      try {
        const known = this.#last ? { "last-event-id": this.#last } : {};
        const response = await fetch(address(["events"]), { headers: headers(known), signal, cache: "no-store" });
        if (!response.ok) throw new Error(String(response.status));
        this.#tell(true);
        this.#wait = SHORTEST;
        // Without a last event id the server cannot replay what was missed, so reload everything.
        if (missed && !this.#last) this.#hear("everything", {});
        await this.#read(response.body.getReader());
      } catch {
        if (signal.aborted) return;
      }
      missed = true;
      this.#tell(false);
      await new Promise((done) => setTimeout(done, this.#wait));
      this.#wait = Math.min(this.#wait * 2, LONGEST);
    }
  }

  stop() {
    this.#stop.abort();
  }

  async #read(reader) {
    const text = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += text.decode(value, { stream: true });
      const frames = rest.split("\n\n");
      rest = frames.pop();
      for (const frame of frames) this.#frame(frame);
    }
  }

  #frame(frame) {
    const fields = Object.fromEntries(
      frame
        .split("\n")
        .filter((line) => !line.startsWith(":"))
        .map((line) => {
          const place = line.indexOf(":");
          return place < 0 ? [line, ""] : [line.slice(0, place), line.slice(place + 1).trimStart()];
        }),
    );
    if (fields.id) this.#last = fields.id;
    if (!fields.event) return;
    let data = {};
    try {
      data = JSON.parse(fields.data ?? "{}");
    } catch {
      // Even unreadable data signals a change.
    }
    this.#hear(fields.event === "dropped" ? "everything" : fields.event, data);
  }
}
