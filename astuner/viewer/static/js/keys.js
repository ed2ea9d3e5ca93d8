// Keys of all pages, and the dialog that lists them.

import { currentAddress, link } from "./address.js";
import { h } from "./dom.js";
import { EPISODE_LINKS, rememberList } from "./list_order.js";

const KEYS = [
  ["j", "next message; in a list, the next row"], ["k", "previous message; in a list, the previous row"],
  ["Enter", "open the selected row"], ["J", "next episode of the list"], ["K", "previous episode of the list"],
  ["→", "next token"], ["←", "previous token"], ["/", "search"], ["?", "show the keys"], ["Esc", "close the keys"],
];
const ITEMS = ".chat .message, .aligned > .pair, table.list tbody tr, .side > article";
const WAIT = 3000;

export function installKeys(main, button) {
  const dialog = keyDialog();
  document.body.append(dialog);
  const show = () => { if (!dialog.open) dialog.showModal(); };
  button.addEventListener("click", show);
  const actions = {
    j: () => move(main, 1), k: () => move(main, -1),
    J: () => main.querySelector("[data-key=next]")?.click(), K: () => main.querySelector("[data-key=previous]")?.click(),
    "/": () => search(main), "?": show,
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open || isTyping(event.target)) return;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") { moveToken(main, event); return; }
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  });
  main.addEventListener("click", (event) => {
    if (currentAddress().page !== "episode" && event.target.closest?.(EPISODE_LINKS)) rememberList(main);
  });
}

const isTyping = (element) => element instanceof Element && element.closest("input, select, textarea, [contenteditable]") !== null;

// Focus the next or previous item of the page, beginning with the item that has the focus.
function move(main, by) {
  const items = [...main.querySelectorAll(ITEMS)].filter((item) => item.offsetParent !== null && item.querySelector("a[href], .said, .role"));
  if (!items.length) return;
  const at = items.findIndex((item) => item.contains(document.activeElement));
  const item = items[Math.min(items.length - 1, Math.max(0, at < 0 ? (by > 0 ? 0 : items.length - 1) : at + by))];
  const target = item.matches(".message, .pair") ? item : item.querySelector(EPISODE_LINKS) ?? item.querySelector("a[href]");
  target.focus();
  item.scrollIntoView({ block: "nearest" });
}

function moveToken(main, event) {
  const box = main.querySelector(".tokens");
  // The box handles its own keys. Other scrollable parts and the tree keep the arrow keys.
  if (!box || box.contains(event.target) || event.target.closest?.("[tabindex='0'], summary, details > .tree")) return;
  event.preventDefault();
  box.dispatchEvent(new KeyboardEvent("keydown", { key: event.key }));
}

function search(main) {
  const field = () => main.querySelector("input[type=search]");
  if (field()) { field().focus(); field().select(); return; }
  const run = currentAddress().query.get("run");
  if (!run) return;
  location.hash = link("episodes", { run });
  const start = performance.now();
  const wait = () => {
    if (field()) field().focus();
    else if (performance.now() - start < WAIT) requestAnimationFrame(wait);
  };
  wait();
}

function keyDialog() {
  const close = h("button", { type: "button", onclick: () => dialog.close(), autofocus: true }, "close");
  const dialog = h("dialog", { class: "keys card", "aria-labelledby": "keys-title" }, h("h2", { id: "keys-title" }, "Keys"),
    h("dl", { class: "facts" }, KEYS.map(([key, meaning]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, meaning)])),
    h("p", { class: "soft" }, "Keys have no effect while you type in a field."), close);
  return dialog;
}
