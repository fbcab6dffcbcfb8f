// Sets light or dark before anything is drawn; loaded as a plain script, ahead of the modules.
(() => {
  const root = document.documentElement;
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem("reader-theme");
  } catch {
    chosen = null; // storage is switched off: the system's theme holds
  }
  const apply = () => {
    root.dataset.theme = chosen ?? (wanted.matches ? "dark" : "light");
  };
  wanted.addEventListener("change", apply);
  apply();
  globalThis.readerTheme = {
    /** Switches to the other theme, which holds on this browser from now on; returns its name. */
    toggle() {
      chosen = root.dataset.theme === "dark" ? "light" : "dark";
      try {
        localStorage.setItem("reader-theme", chosen);
      } catch {
        // not kept then
      }
      apply();
      return chosen;
    },
  };
})();
