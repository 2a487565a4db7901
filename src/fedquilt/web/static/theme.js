// A button that switches between light and dark; without a choice the system's is used.
"use strict";
(function () {
  const key = "fedquilt-theme";
  const root = document.documentElement;
  function recall() {
    try { return localStorage.getItem(key); } catch { return null; }
  }
  function keep(value) {
    try { localStorage.setItem(key, value); } catch { /* private windows keep nothing */ }
  }
  function isDark() {
    return root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  const saved = recall();
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;
  function addButton() {
    const nav = document.querySelector(".bar nav");
    if (!nav) return;
    const button = document.createElement("button");
    button.type = "button";
    button.id = "theme";
    const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
    button.setAttribute("aria-label", "Switch between light and dark");
    name();
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      keep(root.dataset.theme);
      name();
      document.dispatchEvent(new CustomEvent("themechange"));
    });
    nav.append(button);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", addButton);
  else addButton();
})();
