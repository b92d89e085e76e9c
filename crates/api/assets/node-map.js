// Draws up to ten thousand nodes as cells on a canvas, in labelled blocks. Each cell style is rendered once as a sprite, whose pixels are
// copied to every node with that style. That takes a few milliseconds; one drawing command per node would take a hundred. Elements over
// the canvas show the cursor and the tooltip, so that moving the pointer does not redraw the canvas.

import { themeColours } from "./colours.js";
import { el } from "./dom.js";
import { formatCount } from "./format.js";

// Space above and between blocks; narrow for many blocks.
const WIDE_SPACING = { label: 20, gap: 14, font: 12 };
const NARROW_SPACING = { label: 14, gap: 7, font: 10 };
const NARROW_SPACING_ABOVE = 60;
// Up to this many blocks use the full width; more are placed side by side.
const MAX_FULL_WIDTH_GROUPS = 8;
// The style number of a node that is not drawn yet.
const NOT_DRAWN = 255;

export class NodeMap {
  #canvas = el("canvas", { "aria-hidden": "true" });
  #clip = el("div", { class: "map-clip" }, this.#canvas);
  #cursor = el("div", { class: "cursor", hidden: true });
  #tooltip = el("div", { class: "tip", hidden: true });
  #announcer = el("div", { class: "visually-hidden", "aria-live": "polite" });
  #blocks = [];
  // By node number: the index of its block, and its place there.
  #blockOf = new Uint32Array(0);
  #placeOf = new Uint32Array(0);
  #pitch = 12;
  #spacing = WIDE_SPACING;
  #layoutWidth = 0;
  // Of the visible part, in pixels of the canvas.
  #height = 0;
  #pixels = null;
  #drawnStyles = null;
  #sprites = [];
  #spriteKey = "";
  #current = -1;
  #data = null;
  #openNode;
  #describeNode;

  // `describe` returns the lines of the tooltip of a node number, `open` navigates to the node.
  constructor({ open, describe, label }) {
    this.#openNode = open;
    this.#describeNode = describe;
    this.element = el(
      "div",
      { class: "map", tabindex: "0", role: "application", "aria-label": label, "data-key": "map" },
      this.#clip,
      this.#cursor,
      this.#tooltip,
      this.#announcer,
    );
    this.element.addEventListener("pointermove", (event) => this.#select(this.#nodeAtEvent(event)));
    this.element.addEventListener("pointerleave", () => this.#select(-1));
    this.element.addEventListener("click", (event) => {
      const node = this.#nodeAtEvent(event);
      if (node >= 0) this.#openNode(node);
    });
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
    this.element.addEventListener("blur", () => this.#select(-1));
    new ResizeObserver(() => this.element.clientWidth !== this.#layoutWidth && this.#layout()).observe(this.element);
  }

  // groups: [{ name, nodes: [numbers] }]; styles: [{ colour, shape }]; by node number, `styleIndex`: the index of its style, and
  // `matches`: 1 if it matches the filter. Nodes that do not match are hidden, and the others take their place.
  show(data) {
    this.#data = data;
    [this.#layoutWidth, this.#pixels] = [0, null];
    this.#layout();
  }

  // Changes the styles of the same nodes. `redrawLabels`: the theme has changed too.
  recolour(styles, styleIndex, matches, redrawLabels = false) {
    if (!this.#data) return;
    const sameNodes = this.#data.matches.every((match, node) => match === matches[node]);
    Object.assign(this.#data, { styles, styleIndex, matches });
    if (!sameNodes || !this.#layoutWidth) this.#layout();
    else if (redrawLabels) this.#redraw();
    else this.#drawChangedCells();
  }

  // The groups without hidden nodes.
  #visibleGroups() {
    const { groups, matches } = this.#data;
    if (matches.every(Boolean)) return groups;
    const visible = groups.map(({ name, nodes }) => ({ name, nodes: nodes.filter((node) => matches[node]) }));
    return visible.filter(({ nodes }) => nodes.length);
  }

  #layout() {
    const width = this.element.clientWidth;
    if (!width || !this.#data) {
      // Not on the page: lay out when it is.
      this.#layoutWidth = 0;
      return;
    }
    this.#layoutWidth = width;
    this.#select(-1);
    const groups = this.#visibleGroups();
    const count = groups.reduce((sum, { nodes }) => sum + nodes.length, 0);
    const height = Math.max(320, innerHeight * 0.62);
    const fullWidth = groups.length <= MAX_FULL_WIDTH_GROUPS;
    const area = width * height * (fullWidth ? 0.94 : 0.6);
    this.#pitch = Math.round(Math.min(34, Math.max(7, Math.sqrt(area / Math.max(1, count)))));
    const maxColumns = Math.max(1, Math.floor(width / this.#pitch));
    this.#spacing = groups.length > NARROW_SPACING_ABOVE ? NARROW_SPACING : WIDE_SPACING;
    const { label, gap, font } = this.#spacing;
    // A block is as wide as its label, up to six columns.
    const minColumns = (name) => Math.min(6, Math.ceil((this.#label(name, 99).length * font * 0.6) / this.#pitch));
    let [x, y, tallest] = [0, 0, 0];
    this.#blocks = [];
    [this.#blockOf, this.#placeOf] = [new Uint32Array(this.#data.count), new Uint32Array(this.#data.count)];
    for (const { name, nodes } of groups) {
      const columns = fullWidth ? maxColumns : Math.min(maxColumns, Math.max(minColumns(name), Math.ceil(Math.sqrt(nodes.length) * 1.3)));
      const rows = Math.ceil(nodes.length / columns);
      if (x > 0 && x + columns * this.#pitch > width) [x, y, tallest] = [0, y + tallest + gap, 0];
      const block = { name, nodes, columns, rows, x, y: y + label };
      for (let index = 0; index < nodes.length; index += 1) {
        this.#blockOf[nodes[index]] = this.#blocks.length;
        this.#placeOf[nodes[index]] = index;
      }
      this.#blocks.push(block);
      tallest = Math.max(tallest, label + rows * this.#pitch);
      x += columns * this.#pitch + gap;
      if (fullWidth) [x, y, tallest] = [0, y + tallest + gap, 0];
    }
    const bottom = y + tallest;
    const scale = devicePixelRatio || 1;
    // Setting a size, even the same, allocates the canvas anew. A filter therefore leaves it as large as it was, and hides the lower part.
    const [pixelWidth, pixelHeight] = [Math.round(width * scale), Math.round(bottom * scale)];
    if (this.#canvas.width !== pixelWidth) this.#canvas.width = pixelWidth;
    if (this.#canvas.height < pixelHeight) this.#canvas.height = pixelHeight;
    this.#canvas.style.width = `${width}px`;
    this.#canvas.style.height = `${this.#canvas.height / scale}px`;
    this.#clip.style.height = `${bottom}px`;
    [this.#height, this.#pixels] = [pixelHeight, null];
    this.#redraw();
  }

  // Draws the labels and all cells.
  #redraw() {
    if (!this.#layoutWidth) return;
    // Reading what is on the canvas instead would take longer than drawing it.
    this.#pixels = new ImageData(this.#canvas.width, Math.max(1, this.#height));
    this.#drawnStyles = new Uint8Array(this.#data.count).fill(NOT_DRAWN);
    this.#drawChangedCells();
  }

  // Draws the cells whose style has changed.
  #drawChangedCells() {
    if (!this.#pixels) return;
    const { styles, styleIndex } = this.#data;
    const { surface: background, text } = themeColours();
    const scale = devicePixelRatio || 1;
    const key = JSON.stringify([background, scale, this.#pitch, styles.map(({ colour, shape }) => [colour, shape])]);
    if (key !== this.#spriteKey) {
      this.#sprites = styles.map((style) => this.#renderSprite(style, background, scale));
      this.#spriteKey = key;
      this.#drawnStyles.fill(NOT_DRAWN);
    }
    const { width, height } = this.#pixels;
    const pixels = new Uint32Array(this.#pixels.data.buffer);
    let changed = false;
    for (const { nodes, columns, x, y } of this.#blocks) {
      for (let index = 0; index < nodes.length; index += 1) {
        const node = nodes[index];
        const style = styleIndex[node];
        if (this.#drawnStyles[node] === style) continue;
        this.#drawnStyles[node] = style;
        const { side, cell } = this.#sprites[style];
        const left = Math.round((x + (index % columns) * this.#pitch) * scale);
        const cellTop = Math.round((y + Math.floor(index / columns) * this.#pitch) * scale);
        const [cellWidth, cellHeight] = [Math.min(side, width - left), Math.min(side, height - cellTop)];
        for (let row = 0; row < cellHeight; row += 1)
          for (let column = 0; column < cellWidth; column += 1) pixels[(cellTop + row) * width + left + column] = cell[row * side + column];
        changed = true;
      }
    }
    if (changed) {
      const context = this.#canvas.getContext("2d", { willReadFrequently: true });
      context.putImageData(this.#pixels, 0, 0);
      context.setTransform(scale, 0, 0, scale, 0, 0);
      this.#drawLabels(context, text);
    }
    // For tests that wait until the nodes are drawn.
    this.element.dataset.cells = String(this.#blocks.reduce((sum, block) => sum + block.nodes.length, 0));
  }

  #label(name, count) {
    return this.#spacing === WIDE_SPACING ? `${name} · ${formatCount(count)}` : name;
  }

  #drawLabels(context, textColour) {
    const { label, font } = this.#spacing;
    context.fillStyle = textColour;
    context.font = `${font}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    for (const { name, nodes, x, y, columns } of this.#blocks) {
      const text = this.#label(name, nodes.length);
      const blockWidth = columns * this.#pitch;
      // fillText with a maximum width is slower, and most names fit.
      if (text.length * font * 0.6 > blockWidth) context.fillText(text, x, y - label / 2, blockWidth);
      else context.fillText(text, x, y - label / 2);
    }
  }

  #cellOrigin(node) {
    const [block, index] = [this.#blocks[this.#blockOf[node]], this.#placeOf[node]];
    return [block.x + (index % block.columns) * this.#pitch, block.y + Math.floor(index / block.columns) * this.#pitch];
  }

  // Returns the pixels of a cell of this style, with its spacing.
  #renderSprite({ colour, shape }, background, scale) {
    const side = Math.max(1, Math.floor(this.#pitch * scale));
    const size = this.#pitch - (this.#pitch > 9 ? 2 : 1);
    const context = el("canvas", { width: side, height: side }).getContext("2d", { willReadFrequently: true });
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.fillStyle = context.strokeStyle = colour;
    context.lineWidth = shape === "frame" ? 2.5 : 1;
    if (shape === "hollow" || shape === "half" || shape === "frame") {
      const inset = context.lineWidth / 2;
      context.strokeRect(inset, inset, size - 2 * inset, size - 2 * inset);
    } else context.fillRect(0, 0, size, size);
    if (shape === "half") context.fill(new Path2D(`M0 0V${size}H${size}Z`));
    context.fillStyle = context.strokeStyle = background;
    context.lineWidth = Math.max(1, size * 0.14);
    const [near, far] = [size * 0.25, size * 0.75];
    if (shape === "cross") context.stroke(new Path2D(`M${near} ${near}L${far} ${far}M${far} ${near}L${near} ${far}`));
    if (shape === "bar") context.fillRect(size * 0.2, size * 0.42, size * 0.6, Math.max(1, size * 0.16));
    if (shape === "dot") context.fillRect(size * 0.36, size * 0.36, size * 0.28, size * 0.28);
    return { side, cell: new Uint32Array(context.getImageData(0, 0, side, side).data.buffer) };
  }

  #nodeAtEvent(event) {
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

  #select(node, announce = false) {
    if (node === this.#current && !announce) return;
    this.#current = node;
    this.#cursor.hidden = this.#tooltip.hidden = node < 0;
    if (node < 0) return;
    const [x, y] = this.#cellOrigin(node);
    this.#cursor.style.transform = `translate(${x - 2}px, ${y - 2}px)`;
    this.#cursor.style.width = this.#cursor.style.height = `${this.#pitch + 2}px`;
    const lines = this.#describeNode(node);
    this.#tooltip.replaceChildren(...lines.map((line, index) => el(index ? "div" : "strong", {}, line)));
    // Reading the width of the element here would compute the page's layout for every movement of the pointer.
    const right = x > this.#layoutWidth / 2;
    const left = right ? x - 8 : x + this.#pitch + 8;
    this.#tooltip.style.transform = `translate(${left}px, ${y + this.#pitch + 4}px) translateX(${right ? "-100%" : "0"})`;
    if (announce) this.#announcer.textContent = lines.join(", ");
  }

  #onKey(event) {
    const nodes = this.#blocks.flatMap((block) => block.nodes);
    if (!nodes.length) return;
    const current = this.#current >= 0 ? this.#current : null;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    let target = null;
    if (event.key === "Enter" && current !== null) this.#openNode(current);
    else if (event.key === "Escape") this.#select(-1);
    else if (event.key === "Home") target = nodes[0];
    else if (event.key === "End") target = nodes.at(-1);
    else if (step && current === null) target = nodes[0];
    else if (step) target = event.key.endsWith("t") ? nodes[nodes.indexOf(current) + step] : this.#nodeAboveOrBelow(current, step);
    else return;
    event.preventDefault();
    if (target === null || target === undefined) return;
    this.#select(target, true);
    this.#cursor.scrollIntoView({ block: "nearest" });
  }

  // Returns the next node above or below, also in another block.
  #nodeAboveOrBelow(node, step) {
    const [x, y] = this.#cellOrigin(node);
    const bottom = this.#clip.clientHeight;
    for (let top = y + step * this.#pitch; top >= 0 && top < bottom; top += (step * this.#pitch) / 2) {
      const found = this.#nodeAt(x + this.#pitch / 2, top + this.#pitch / 2);
      if (found >= 0 && found !== node) return found;
    }
    return undefined;
  }
}
