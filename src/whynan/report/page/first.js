// Before the first paint: light or dark, as chosen here before, else as the system says.
(function () {
  var chosen = null;
  try { chosen = localStorage.getItem("whynan-theme"); } catch (error) { /* storage may be closed */ }
  var dark = chosen ? chosen === "dark" : window.matchMedia && matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.documentElement.classList.add("js");
})();
