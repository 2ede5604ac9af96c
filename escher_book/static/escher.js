// Loaded on every page of the book.
(function () {
  "use strict";

  // Under file:// a page may not fetch another one: search then lists its hits without the text around them.
  if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined") {
    DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
  }

  // A wide table scrolls inside its own box, by keyboard too; the page never scrolls sideways.
  document.addEventListener("DOMContentLoaded", function () {
    document.querySelectorAll("table.escher").forEach(function (table) {
      let box = table.closest(".escher-scroll");
      if (!box) {
        box = document.createElement("div");
        box.className = "escher-scroll";
        table.parentNode.insertBefore(box, table);
        box.appendChild(table);
      }
      if (box.scrollWidth > box.clientWidth) {
        box.tabIndex = 0;
        box.setAttribute("role", "region");
        box.setAttribute("aria-label", (table.caption && table.caption.textContent.trim()) || "wide table");
      }
    });
  });
})();
