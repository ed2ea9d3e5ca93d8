// A dialog that edits the note and the tags of a run.

import { postJson } from "./address.js";
import { brief, h } from "./dom.js";

export function editNote(run, saved) {
  const text = h("textarea", { name: "note", rows: 5, cols: 48, maxlength: 10000 });
  text.value = run.note ?? "";
  const tags = h("input", { type: "text", name: "tags", size: 40, value: (run.tags ?? []).join(", "), placeholder: "baseline, to keep" });
  const problem = h("p", { class: "bad", role: "alert" });
  const close = () => { dialog.close(); dialog.remove(); };
  const save = async (event) => {
    event.preventDefault();
    const words = tags.value.split(",").map((tag) => tag.trim().replace(/^#/, "")).filter(Boolean);
    try {
      await postJson("note", { run: run.name }, { text: text.value, tags: words });
    } catch (error) {
      problem.textContent = error.message;
      return;
    }
    close();
    await saved();
  };
  const dialog = h("dialog", { class: "card note-dialog", "aria-label": "note and tags", onclose: () => dialog.remove() },
    h("form", { onsubmit: save }, h("h2", {}, brief(run.name, 60)),
      h("label", {}, "note", text), h("label", {}, "tags, separated by commas", tags), problem,
      h("div", { class: "bar" }, h("button", { type: "submit" }, "Save"), h("button", { type: "button", onclick: close }, "Cancel"))));
  document.body.append(dialog);
  dialog.showModal();
  text.focus();
}
