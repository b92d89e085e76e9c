// Up to ten thousand nodes as cells on a canvas, in labelled blocks. A cell of each look is drawn once as a stamp, whose pixels are copied
// to every node with that look: that takes a few milliseconds for all, where as many drawing commands take a hundred. An element above the
// canvas shows the node under the pointer or keyboard cursor, so nothing is redrawn for it.

import { tones } from "./colours.js";
import { el } from "./dom.js";
import { whole } from "./words.js";

// Space above and between blocks; less for hundreds of them.
const ROOMY = { label: 20, gap: 14, font: 12 };
const TIGHT = { label: 14, gap: 7, font: 10 };
const MANY = 60;
// Up to this many blocks use the full width; more are placed side by side.
const FULL_WIDTH = 8;
// The look of a node that is not drawn yet.
const NONE = 255;

export class NodeMap {
  #canvas = el("canvas", { "aria-hidden": "true" });
  #cursor = el("div", { class: "cursor", hidden: true });
  #tip = el("div", { class: "tip", hidden: true });
  #said = el("div", { class: "hidden", "aria-live": "polite" });
  #blocks = [];
  #place = [];
  #pitch = 12;
  #spacing = ROOMY;
  #laid = 0;
  #pixels = null;
  #drawn = null;
  #stamps = [];
  #stamped = "";
  #at = -1;
  #shown = null;
  #open;
  #describe;

  // `describe` returns lines of text for a node number, `open` navigates to it.
  constructor({ open, describe, label }) {
    this.#open = open;
    this.#describe = describe;
    this.element = el(
      "div",
      { class: "map", tabindex: "0", role: "application", "aria-label": label, "data-key": "map" },
      this.#canvas,
      this.#cursor,
      this.#tip,
      this.#said,
    );
    this.element.addEventListener("pointermove", (event) => this.#point(this.#hit(event)));
    this.element.addEventListener("pointerleave", () => this.#point(-1));
    this.element.addEventListener("click", (event) => {
      const at = this.#hit(event);
      if (at >= 0) this.#open(at);
    });
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("blur", () => this.#point(-1));
    new ResizeObserver(() => this.element.clientWidth !== this.#laid && this.#lay()).observe(this.element);
  }

  // groups: [{ name, nodes: [numbers] }]; looks: [{ colour, mark }]; per node, `at`: its index in looks, and `lit`: 1 if it matches.
  show(shown) {
    this.#shown = shown;
    [this.#laid, this.#pixels] = [0, null];
    this.#lay();
  }

  // Changes the looks of the same nodes in the same places; `labels`: the page's colours changed too.
  recolour(looks, at, lit, labels = false) {
    if (!this.#shown) return;
    Object.assign(this.#shown, { looks, at, lit });
    if (labels) this.#begin();
    else this.#draw();
  }

  #lay() {
    const width = this.element.clientWidth;
    if (!width || !this.#shown) return;
    this.#laid = width;
    const { groups, count } = this.#shown;
    const height = Math.max(320, innerHeight * 0.62);
    const full = groups.length <= FULL_WIDTH;
    const room = width * height * (full ? 0.94 : 0.6);
    this.#pitch = Math.round(Math.min(34, Math.max(7, Math.sqrt(room / Math.max(1, count)))));
    const most = Math.max(1, Math.floor(width / this.#pitch));
    this.#spacing = groups.length > MANY ? TIGHT : ROOMY;
    const { label, gap } = this.#spacing;
    let [x, y, tallest] = [0, 0, 0];
    this.#blocks = [];
    this.#place = new Array(count);
    for (const { name, nodes } of groups) {
      const columns = full ? most : Math.min(most, Math.max(6, Math.ceil(Math.sqrt(nodes.length) * 1.3)));
      const rows = Math.ceil(nodes.length / columns);
      if (x > 0 && x + columns * this.#pitch > width) [x, y, tallest] = [0, y + tallest + gap, 0];
      const block = { name, nodes, columns, rows, x, y: y + label };
      nodes.forEach((node, place) => (this.#place[node] = { block, place }));
      this.#blocks.push(block);
      tallest = Math.max(tallest, label + rows * this.#pitch);
      x += columns * this.#pitch + gap;
      if (full) [x, y, tallest] = [0, y + tallest + gap, 0];
    }
    const bottom = y + tallest;
    const scale = devicePixelRatio || 1;
    this.#canvas.width = Math.round(width * scale);
    this.#canvas.height = Math.round(bottom * scale);
    this.#canvas.style.width = `${width}px`;
    this.#canvas.style.height = `${bottom}px`;
    this.#begin();
  }

  // Clears the canvas and draws the labels, which stay when looks change.
  #begin() {
    if (!this.#laid) return;
    const context = this.#canvas.getContext("2d", { willReadFrequently: true });
    const scale = devicePixelRatio || 1;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    this.#label(context, tones().ink);
    this.#pixels = context.getImageData(0, 0, this.#canvas.width, Math.max(1, this.#canvas.height));
    this.#drawn = new Uint8Array(this.#shown.count).fill(NONE);
    this.#draw();
  }

  // Draws the cells whose look has changed.
  #draw() {
    if (!this.#pixels) return;
    const { looks, at: places, lit } = this.#shown;
    const { paper } = tones();
    const scale = devicePixelRatio || 1;
    const stamped = JSON.stringify([paper, scale, this.#pitch, looks.map(({ colour, mark }) => [colour, mark])]);
    if (stamped !== this.#stamped) {
      // Nodes that do not match are drawn faintly, because positions matter.
      this.#stamps = looks.flatMap((look) => [0.13, 1].map((alpha) => this.#stamp(look, alpha, paper, scale)));
      this.#stamped = stamped;
      this.#drawn.fill(NONE);
    }
    const { width, height } = this.#pixels;
    const pixels = new Uint32Array(this.#pixels.data.buffer);
    let [top, bottom] = [height, 0];
    for (const { nodes, columns, x, y } of this.#blocks) {
      for (let place = 0; place < nodes.length; place += 1) {
        const node = nodes[place];
        const look = 2 * places[node] + lit[node];
        if (this.#drawn[node] === look) continue;
        this.#drawn[node] = look;
        const { side, cell } = this.#stamps[look];
        const left = Math.round((x + (place % columns) * this.#pitch) * scale);
        const up = Math.round((y + Math.floor(place / columns) * this.#pitch) * scale);
        const [wide, tall] = [Math.min(side, width - left), Math.min(side, height - up)];
        for (let row = 0; row < tall; row += 1)
          for (let at = 0; at < wide; at += 1) pixels[(up + row) * width + left + at] = cell[row * side + at];
        top = Math.min(top, up);
        bottom = Math.max(bottom, up + tall);
      }
    }
    if (bottom > top) this.#canvas.getContext("2d").putImageData(this.#pixels, 0, 0, 0, top, width, bottom - top);
    // For tests that wait until the nodes are drawn.
    this.element.dataset.cells = String(this.#blocks.reduce((sum, block) => sum + block.nodes.length, 0));
  }

  #label(context, ink) {
    const { label, font } = this.#spacing;
    context.clearRect(0, 0, this.#canvas.width, this.#canvas.height);
    context.fillStyle = ink;
    context.font = `${font}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    for (const { name, nodes, x, y, columns } of this.#blocks) {
      const text = this.#spacing === ROOMY ? `${name} · ${whole(nodes.length)}` : name;
      const wide = columns * this.#pitch;
      // A maximum width costs time, and most names fit.
      if (text.length * font * 0.6 > wide) context.fillText(text, x, y - label / 2, wide);
      else context.fillText(text, x, y - label / 2);
    }
  }

  #corner(node) {
    const { block, place } = this.#place[node];
    return [block.x + (place % block.columns) * this.#pitch, block.y + Math.floor(place / block.columns) * this.#pitch];
  }

  // A cell of this look, with its spacing, as pixels.
  #stamp({ colour, mark }, alpha, paper, scale) {
    const side = Math.max(1, Math.floor(this.#pitch * scale));
    const size = this.#pitch - (this.#pitch > 9 ? 2 : 1);
    const context = el("canvas", { width: side, height: side }).getContext("2d", { willReadFrequently: true });
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.globalAlpha = alpha;
    context.fillStyle = context.strokeStyle = colour;
    context.lineWidth = mark === "frame" ? 2.5 : 1;
    if (mark === "hollow" || mark === "half" || mark === "frame") {
      const inset = context.lineWidth / 2;
      context.strokeRect(inset, inset, size - 2 * inset, size - 2 * inset);
    } else context.fillRect(0, 0, size, size);
    if (mark === "half") context.fill(new Path2D(`M0 0V${size}H${size}Z`));
    context.fillStyle = context.strokeStyle = paper;
    context.lineWidth = Math.max(1, size * 0.14);
    const [near, far] = [size * 0.25, size * 0.75];
    if (mark === "cross") context.stroke(new Path2D(`M${near} ${near}L${far} ${far}M${far} ${near}L${near} ${far}`));
    if (mark === "bar") context.fillRect(size * 0.2, size * 0.42, size * 0.6, Math.max(1, size * 0.16));
    if (mark === "dot") context.fillRect(size * 0.36, size * 0.36, size * 0.28, size * 0.28);
    return { side, cell: new Uint32Array(context.getImageData(0, 0, side, side).data.buffer) };
  }

  #hit(event) {
    const bounds = this.#canvas.getBoundingClientRect();
    return this.#nodeAt(event.clientX - bounds.left, event.clientY - bounds.top);
  }

  #nodeAt(x, y) {
    for (const block of this.#blocks) {
      const [column, row] = [Math.floor((x - block.x) / this.#pitch), Math.floor((y - block.y) / this.#pitch)];
      if (column < 0 || column >= block.columns || row < 0 || row >= block.rows) continue;
      return block.nodes[row * block.columns + column] ?? -1;
    }
    return -1;
  }

  #point(node, aloud = false) {
    if (node === this.#at && !aloud) return;
    this.#at = node;
    this.#cursor.hidden = this.#tip.hidden = node < 0;
    if (node < 0) return;
    const [x, y] = this.#corner(node);
    this.#cursor.style.transform = `translate(${x - 2}px, ${y - 2}px)`;
    this.#cursor.style.width = this.#cursor.style.height = `${this.#pitch + 2}px`;
    const lines = this.#describe(node);
    this.#tip.replaceChildren(...lines.map((line, place) => el(place ? "div" : "strong", {}, line)));
    const right = x > this.element.clientWidth / 2;
    this.#tip.style.transform = `translate(${right ? x - 8 : x + this.#pitch + 8}px, ${y + this.#pitch + 4}px) translateX(${right ? "-100%" : "0"})`;
    if (aloud) this.#said.textContent = lines.join(", ");
  }

  #key(event) {
    const nodes = this.#blocks.flatMap((block) => block.nodes);
    if (!nodes.length) return;
    const at = this.#at >= 0 ? this.#at : null;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    let to = null;
    if (event.key === "Enter" && at !== null) this.#open(at);
    else if (event.key === "Escape") this.#point(-1);
    else if (event.key === "Home") to = nodes[0];
    else if (event.key === "End") to = nodes.at(-1);
    else if (step && at === null) to = nodes.find((node) => this.#shown.lit[node]) ?? nodes[0];
    else if (step) to = event.key.endsWith("t") ? nodes[nodes.indexOf(at) + step] : this.#beyond(at, step);
    else return;
    event.preventDefault();
    if (to === null || to === undefined) return;
    this.#point(to, true);
    this.#cursor.scrollIntoView({ block: "nearest" });
  }

  // The next cell above or below, also across blocks.
  #beyond(node, step) {
    const [x, y] = this.#corner(node);
    const bottom = this.#canvas.clientHeight;
    for (let to = y + step * this.#pitch; to >= 0 && to < bottom; to += (step * this.#pitch) / 2) {
      const found = this.#nodeAt(x + this.#pitch / 2, to + this.#pitch / 2);
      if (found >= 0 && found !== node) return found;
    }
    return undefined;
  }
}
