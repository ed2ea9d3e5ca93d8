// The notices of a page that is loading, and of a server that does not answer.

import { h } from "./dom.js";

// Pages that are drawn sooner do not flash.
const DELAY = 150, SLOW = 4000;

// Show that `main` loads until the returned function is called. The earlier content stays visible for a moment.
export function showLoading(main, live) {
  main.setAttribute("aria-busy", "true");
  live.textContent = "loading …";
  const box = h("p", { class: "card loading", role: "status" }, "Loading …");
  const timers = [
    setTimeout(() => main.replaceChildren(box), DELAY),
    setTimeout(() => { box.textContent = "Still loading. The viewer reads a long record when it is opened for the first time."; }, SLOW),
  ];
  return () => {
    timers.forEach(clearTimeout);
    main.removeAttribute("aria-busy");
    live.textContent = "";
  };
}

// A card for an error, with a button that draws the page again.
export function errorCard(error, retry) {
  return h("div", { class: "card error", role: "alert" }, error.message, " ",
    h("button", { type: "button", onclick: retry }, "Try again"));
}
