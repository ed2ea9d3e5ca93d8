// Check boxes to choose two episodes, and the button that compares them.

import { link } from "./address.js";
import { h } from "./dom.js";

// Returns box(row), a check box for an episode, and bar(), the button. The choice survives a redraw of the page.
export function pairChooser(run) {
  const chosen = [];
  const buttons = new Set();
  const update = () => {
    for (const button of buttons) {
      button.disabled = chosen.length !== 2;
      button.textContent = chosen.length === 2 ? "compare the two selected episodes" : `select two episodes to compare (${chosen.length} of 2)`;
    }
  };
  const compare = () => { location.hash = link("compare", { run, episode: chosen[0], with: chosen[1] }); };
  return {
    box: (row) => h("input", { type: "checkbox", name: `choose-${row.key}`, checked: chosen.includes(row.key), "aria-label": `compare ${row.episode}`,
      onchange: (event) => {
        if (event.target.checked) chosen.push(row.key); else chosen.splice(chosen.indexOf(row.key), 1);
        update();
      } }),
    bar: () => {
      const button = h("button", { type: "button", onclick: compare });
      buttons.add(button);
      update();
      return h("div", { class: "bar" }, button);
    },
  };
}
