// Operator commands. A dialog shows the plan, which the operator must confirm. The controller checks permissions; hidden buttons are only a
// convenience.

import { get, post, storeToken, storedToken } from "./api.js";
import { el, inlineCode, replaceContent } from "./dom.js";

export const ACTIONS = {
  test: { title: "Test now", verb: "Test", nodes: true, fields: [["tests", "Tests or suites", "all regular tests"]] },
  hold: { title: "Hold", verb: "Hold", nodes: true, fields: [["until", "Until", "4h, or a time; empty: until released"]] },
  release: { title: "Release", verb: "Release", nodes: true, fields: [] },
  quarantine: { title: "Quarantine", verb: "Quarantine", nodes: true, danger: true, fields: [["drain", "Evict user work", null]] },
  repair: {
    title: "Repair",
    verb: "Repair",
    nodes: true,
    danger: true,
    fields: [
      ["step", "Step", ["reset", "reboot", "replace"]],
      ["drain", "Evict user work, and give up work on a node that does not answer", null],
    ],
  },
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

function openDialog(title, ...content) {
  const closeButton = el("button", { type: "button", class: "quiet", "aria-label": "Close" }, "✕");
  const dialog = el("dialog", { "aria-label": title }, el("div", { class: "dialog-header" }, el("h2", {}, title), closeButton), ...content);
  closeButton.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

// An input with a placeholder, a checkbox if the placeholder is null, or a choice if it is a list. Nothing is chosen beforehand.
function field(name, label, placeholder) {
  if (Array.isArray(placeholder)) {
    const options = ["", ...placeholder].map((value) => el("option", { value }, value || "choose …"));
    return el("label", { class: "field" }, el("span", {}, label), el("select", { name, required: true }, ...options));
  }
  const input =
    placeholder === null
      ? el("input", { type: "checkbox", name })
      : el("input", { type: "text", name, placeholder, autocomplete: "off" });
  return el("label", { class: placeholder === null ? "field check" : "field" }, el("span", {}, label), input);
}

function requestBody(action, form) {
  const request = { why: form.elements.why.value.trim() };
  if (action.nodes) request.nodes = form.elements.nodes.value.split(/[\s;]+/).filter(Boolean);
  for (const [name, , placeholder] of action.fields) {
    const input = form.elements[name];
    if (placeholder === null) request[name] = input.checked;
    else if (input.value.trim()) request[name] = name === "tests" ? input.value.trim().split(/[\s,]+/) : input.value.trim();
  }
  return request;
}

// Opens a dialog that asks for the parameters, shows the plan and executes it on confirmation; then calls `done`.
export function openActionDialog(name, nodes = [], done = () => {}) {
  const action = ACTIONS[name];
  const output = el("div", { class: "action-result", role: "status" });
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
    ...action.fields.map(([fieldName, label, placeholder]) => field(fieldName, label, placeholder)),
    el(
      "label",
      { class: "field" },
      el("span", {}, "Why (recorded in the audit trail)"),
      el("input", { type: "text", name: "why", required: true, maxlength: "500", autocomplete: "off" }),
    ),
    el("div", { class: "buttons" }, el("button", { type: "submit" }, "Show what would happen")),
  );
  const dialog = openDialog(action.title, form, output);

  const showError = (error) =>
    replaceContent(
      output,
      el(
        "p",
        { class: "error", role: "alert" },
        inlineCode(error.message),
        error.accepted ? [" (", inlineCode(error.accepted), ")"] : "",
      ),
    );
  const showPlan = (plan, request) => {
    const verb = request.step ?? action.verb.toLowerCase();
    const count = plan.nodes.length;
    const named = count === 1 ? plan.nodes[0] : `${count} nodes`;
    const confirm = el(
      "button",
      { type: "button", class: action.danger ? "danger" : "primary" },
      action.nodes ? `Confirm: ${verb} ${named}` : `Confirm: ${verb}`,
    );
    // Beyond the limit of the circuit breaker, the number of nodes is typed and not merely confirmed.
    const typed =
      plan.confirm_nodes &&
      el("input", { type: "text", name: "confirm-nodes", inputmode: "numeric", autocomplete: "off", "aria-label": "Number of nodes" });
    if (typed) {
      confirm.disabled = true;
      typed.addEventListener("input", () => {
        confirm.disabled = Number(typed.value.trim()) !== plan.confirm_nodes;
      });
    }
    const changes = plan.changes.slice(0, 200);
    replaceContent(
      output,
      el("h3", {}, "What would happen"),
      el("p", { class: "strong" }, inlineCode(plan.text)),
      changes.length > 0 && el("ul", {}, ...changes.map((line) => el("li", {}, inlineCode(line)))),
      plan.changes.length > changes.length && el("p", {}, `… and ${plan.changes.length - changes.length} more`),
      typed && el("p", { class: "alert", role: "alert" }, inlineCode(`${plan.limit}.`)),
      typed && el("label", { class: "field" }, el("span", {}, `Type the number of nodes (${plan.confirm_nodes}) to proceed`), typed),
      el("div", { class: "buttons" }, confirm),
    );
    confirm.addEventListener("click", async () => {
      confirm.disabled = true;
      try {
        const number = typed ? { confirm_nodes: plan.confirm_nodes } : {};
        const result = await post(name, { ...request, ...number, confirm: plan.confirm });
        form.hidden = true;
        replaceContent(
          output,
          el("p", { class: "strong" }, "Done. ", inlineCode(result.text)),
          result.next && el("p", {}, inlineCode(result.next)),
        );
        done();
      } catch (error) {
        if (error.plan) {
          showPlan(error.plan, request);
          output.prepend(el("p", { class: "error", role: "alert" }, "The plan has changed. Review it again."));
        } else showError(error);
      }
    });
    (typed || confirm).focus();
  };

  // A changed field invalidates the plan on display.
  form.addEventListener("input", () => replaceContent(output));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const request = requestBody(action, form);
    try {
      showPlan(await post(name, request), request);
    } catch (error) {
      showError(error);
    }
  });
  form.elements[action.nodes && nodes.length === 0 ? "nodes" : "why"].focus();
  return dialog;
}

// Buttons for commands on nodes; null if the user may not act.
export function nodeActionButtons(page, nodes, done) {
  if (!page.user?.may_act) return null;
  const button = (name) =>
    el(
      "button",
      { type: "button", class: ACTIONS[name].danger ? "danger-outline" : "", "data-key": `action-${name}`, on: { click: () => openActionDialog(name, nodes(), done) } },
      `${ACTIONS[name].title}…`,
    );
  return el(
    "div",
    { class: "actions", role: "group", "aria-label": "Actions" },
    ...["test", "hold", "release", "quarantine", "repair"].map(button),
  );
}

// Opens a dialog that asks for a token, verifies it and stores it for this tab.
export function openSignInDialog(done) {
  const output = el("div", { role: "status" });
  const input = el("input", {
    type: "password",
    name: "token",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "doctor_token_…",
  });
  const signOutButton = el("button", { type: "button" }, "Sign out");
  const form = el(
    "form",
    { class: "form" },
    el("p", {}, inlineCode("Create a token with `doctor token create NAME --role operator`. This tab keeps it until it is closed.")),
    el("label", { class: "field" }, el("span", {}, "Token"), input),
    el("div", { class: "buttons" }, el("button", { type: "submit", class: "primary" }, "Sign in"), storedToken() && signOutButton),
  );
  const dialog = openDialog("Sign in", form, output);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const previous = storedToken();
    storeToken(input.value.trim());
    try {
      await get(["whoami"]);
      dialog.close();
      done();
    } catch (error) {
      storeToken(previous);
      replaceContent(output, el("p", { class: "error", role: "alert" }, inlineCode(error.message)));
    }
  });
  signOutButton.addEventListener("click", () => {
    storeToken(null);
    dialog.close();
    done();
  });
  input.focus();
}
