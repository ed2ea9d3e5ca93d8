// Part of a page that is drawn from a response of the server and redrawn when the response changes.

import { h } from "./dom.js";

// request() returns the response, draw(response) returns elements; refresh() returns the response.
export async function polled(request, draw) {
  const box = h("div");
  let latest = null;
  const refresh = async () => {
    const response = await request();
    const text = JSON.stringify(response);
    if (text !== latest) {
      latest = text;
      const old = box.contains(document.activeElement) ? document.activeElement : null;
      box.replaceChildren(...draw(response));
      const again = old && [...box.querySelectorAll("a, input, select")].find((element) => key(element) === key(old));
      // The user may be typing.
      if (again && old.matches("input")) again.value = old.value;
      again?.focus();
    }
    return response;
  };
  await refresh();
  return { box, refresh };
}

const key = (element) => `${element.tagName} ${element.href ?? element.name}`;
