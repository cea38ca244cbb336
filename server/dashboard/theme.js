// Before the page is painted: the theme that was chosen, if one was.
try {
  const theme = localStorage.getItem("radixkv.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is off: the system's choice stands.
}
