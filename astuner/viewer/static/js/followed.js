// A part of a page that is drawn from an answer of the server, and anew only when that has changed.

import { h } from "./dom.js";

// question() asks, draw(answer) returns elements; refresh() returns the answer.
export async function followed(question, draw) {
  const box = h("div");
  let seen = null;
  const refresh = async () => {
    const answer = await question();
    const text = JSON.stringify(answer);
    if (text !== seen) {
      seen = text;
      const held = box.contains(document.activeElement) ? key(document.activeElement) : null;
      box.replaceChildren(...draw(answer));
      if (held) [...box.querySelectorAll("a, input, select")].find((one) => key(one) === held)?.focus();
    }
    return answer;
  };
  await refresh();
  return { box, refresh };
}

const key = (element) => `${element.tagName} ${element.href ?? element.name}`;
