// Operator commands. The plan is shown first and must be confirmed. The controller checks permissions and rejects unauthorised requests,
// whatever these pages show.

import { get, keepToken, post, token } from "./api.js";
import { el, prose, swap } from "./dom.js";

export const ACTIONS = {
  test: { title: "Test now", verb: "Test", nodes: true, fields: [["tests", "Tests or suites", "all regular tests"]] },
  hold: { title: "Hold", verb: "Hold", nodes: true, fields: [["until", "Until", "4h, or a time; empty: until released"]] },
  release: { title: "Release", verb: "Release", nodes: true, fields: [] },
  quarantine: { title: "Quarantine", verb: "Quarantine", nodes: true, fields: [["drain", "Evict user work", null]] },
  pause: {
    title: "Pause validation",
    verb: "Pause",
    nodes: false,
    fields: [
      ["pool", "Only this pool", "all pools"],
      ["for", "For", "4h; empty: until resumed"],
    ],
  },
  resume: { title: "Resume validation", verb: "Resume", nodes: false, fields: [["pool", "Only this pool", "all pools"]] },
  "close-breaker": { title: "Close the circuit breaker", verb: "Close", nodes: false, fields: [] },
};

function dialog(title, ...content) {
  const close = el("button", { type: "button", class: "quiet", "aria-label": "Close" }, "✕");
  const box = el("dialog", { "aria-label": title }, el("div", { class: "bar" }, el("h2", {}, title), close), ...content);
  close.addEventListener("click", () => box.close());
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  return box;
}

function field(name, label, hint) {
  const input =
    hint === null
      ? el("input", { type: "checkbox", name })
      : el("input", { type: "text", name, placeholder: hint, autocomplete: "off" });
  return el("label", { class: hint === null ? "field check" : "field" }, el("span", {}, label), input);
}

function body(action, form) {
  const asked = { why: form.elements.why.value.trim() };
  if (action.nodes) asked.nodes = form.elements.nodes.value.split(/[\s;]+/).filter(Boolean);
  for (const [name, , hint] of action.fields) {
    const input = form.elements[name];
    if (hint === null) asked[name] = input.checked;
    else if (input.value.trim()) asked[name] = name === "tests" ? input.value.trim().split(/[\s,]+/) : input.value.trim();
  }
  return asked;
}

// Prompts for the parameters, shows the plan, and carries it out once it is confirmed; then calls `done`.
export function order(name, nodes = [], done = () => {}) {
  const action = ACTIONS[name];
  const told = el("div", { class: "told", role: "status" });
  const form = el(
    "form",
    { class: "form" },
    action.nodes &&
      el(
        "label",
        { class: "field" },
        el("span", {}, "Nodes"),
        el("input", {
          type: "text",
          name: "nodes",
          required: true,
          value: nodes.join(" "),
          placeholder: "node[01-04]",
          autocomplete: "off",
        }),
      ),
    ...action.fields.map(([field_, label, hint]) => field(field_, label, hint)),
    el(
      "label",
      { class: "field" },
      el("span", {}, "Why (recorded in the audit trail)"),
      el("input", { type: "text", name: "why", required: true, maxlength: "500", autocomplete: "off" }),
    ),
    el("div", { class: "buttons" }, el("button", { type: "submit" }, "Show what would happen")),
  );
  const box = dialog(action.title, form, told);

  const say = (error) =>
    swap(told, el("p", { class: "error", role: "alert" }, prose(error.message), error.accepted ? [" (", prose(error.accepted), ")"] : ""));
  const show = (plan, asked) => {
    const confirm = el("button", { type: "button", class: "primary" }, `Confirm: ${action.verb.toLowerCase()}`);
    const changes = plan.changes.slice(0, 200);
    swap(
      told,
      el("h3", {}, "What would happen"),
      el("p", { class: "strong" }, prose(plan.text)),
      changes.length > 0 && el("ul", {}, ...changes.map((line) => el("li", {}, prose(line)))),
      plan.changes.length > changes.length && el("p", {}, `… and ${plan.changes.length - changes.length} more`),
      el("div", { class: "buttons" }, confirm),
    );
    confirm.addEventListener("click", async () => {
      confirm.disabled = true;
      try {
        const result = await post(name, { ...asked, confirm: plan.confirm });
        form.hidden = true;
        swap(told, el("p", { class: "strong" }, "Done. ", prose(result.text)), result.next && el("p", {}, prose(result.next)));
        done();
      } catch (error) {
        if (error.plan) {
          show(error.plan, asked);
          told.prepend(el("p", { class: "error", role: "alert" }, "The plan has changed. Review it again."));
        } else say(error);
      }
    });
    confirm.focus();
  };

  // Any input changes the plan, so the one shown is no longer valid.
  form.addEventListener("input", () => swap(told));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const asked = body(action, form);
    try {
      show(await post(name, asked), asked);
    } catch (error) {
      say(error);
    }
  });
  form.elements[action.nodes && nodes.length === 0 ? "nodes" : "why"].focus();
  return box;
}

// A row of buttons for nodes; null for viewers.
export function nodeActions(page, nodes, done) {
  if (!page.who?.may_act) return null;
  const button = (name) =>
    el(
      "button",
      { type: "button", "data-key": `do-${name}`, on: { click: () => order(name, nodes(), done) } },
      `${ACTIONS[name].title}…`,
    );
  return el(
    "div",
    { class: "actions", role: "group", "aria-label": "Actions" },
    ...["test", "hold", "release", "quarantine"].map(button),
  );
}

// Prompts for a token, verifies it, and keeps it for this tab.
export function signIn(done) {
  const told = el("div", { role: "status" });
  const input = el("input", {
    type: "password",
    name: "token",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "doctor_token_…",
  });
  const forget = el("button", { type: "button" }, "Sign out");
  const form = el(
    "form",
    { class: "form" },
    el("p", {}, prose("Create a token with `doctor token create NAME --role operator`. This tab keeps it until it is closed.")),
    el("label", { class: "field" }, el("span", {}, "Token"), input),
    el("div", { class: "buttons" }, el("button", { type: "submit", class: "primary" }, "Sign in"), token() && forget),
  );
  const box = dialog("Sign in", form, told);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const before = token();
    keepToken(input.value.trim());
    try {
      await get(["whoami"]);
      box.close();
      done();
    } catch (error) {
      keepToken(before);
      swap(told, el("p", { class: "error", role: "alert" }, prose(error.message)));
    }
  });
  forget.addEventListener("click", () => {
    keepToken(null);
    box.close();
    done();
  });
  input.focus();
}
