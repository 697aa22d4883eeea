// The two tabs of the page (WAI-ARIA: tabs with automatic activation).

const tabs = [...document.querySelectorAll("[role=tab]")];

export function showTab(name) {
  for (const tab of tabs) {
    const isShown = tab.dataset.tab === name;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = !isShown;
  }
}

export const shownTab = () => tabs.find((tab) => tab.getAttribute("aria-selected") === "true").dataset.tab;

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

for (const [at, tab] of tabs.entries()) {
  tab.addEventListener("click", () => showTab(tab.dataset.tab));
  tab.addEventListener("keydown", (event) => {
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    const next = tabs[(at + STEPS[event.key] + tabs.length) % tabs.length];
    showTab(next.dataset.tab);
    next.focus();
  });
}
