// A text field with a list of suggestions below it (WAI-ARIA: an editable combobox with a listbox).

import { element } from "./dom.js";

// `find(text)` gives the names for a text; `onPick()` is called when one was taken.
export function suggest(field, list, find, onPick) {
  let chosen = -1;
  let asked = 0;

  const isOpen = () => !list.hidden;

  function close() {
    list.hidden = true;
    field.setAttribute("aria-expanded", "false");
    field.removeAttribute("aria-activedescendant");
    chosen = -1;
  }

  function take(name) {
    field.value = name;
    asked += 1; // what is still on its way comes too late
    close();
    onPick();
  }

  function mark(at) {
    const options = [...list.children];
    chosen = (at + options.length) % options.length;
    options.forEach((option, index) => option.setAttribute("aria-selected", String(index === chosen)));
    field.setAttribute("aria-activedescendant", options[chosen].id);
    options[chosen].scrollIntoView({ block: "nearest" });
  }

  async function open() {
    const mine = (asked += 1);
    const found = await find(field.value.trim());
    if (mine !== asked || document.activeElement !== field) return;
    if (!found.length || (found.length === 1 && found[0].name === field.value)) {
      close();
      return;
    }
    list.replaceChildren(...found.map(({ name, words }, at) => {
      const option = element("li", { role: "option", id: `${list.id}-${at}`, "aria-selected": "false" },
        name, element("span", { class: "note" }, words));
      option.addEventListener("mousedown", (event) => {
        event.preventDefault(); // the field keeps the focus
        take(name);
      });
      return option;
    }));
    list.hidden = false;
    list.scrollTop = 0;
    field.setAttribute("aria-expanded", "true");
    chosen = -1;
  }

  field.addEventListener("input", open);
  field.addEventListener("click", open);
  field.addEventListener("blur", close);
  field.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && !isOpen()) open();
    else if (!isOpen()) return;
    else if (event.key === "ArrowDown") mark(chosen + 1);
    else if (event.key === "ArrowUp") mark(chosen < 0 ? -1 : chosen - 1);
    else if (event.key === "Escape") close();
    else if (event.key === "Enter" && chosen >= 0) take(list.children[chosen].firstChild.textContent);
    else return;
    event.preventDefault();
  });
}
