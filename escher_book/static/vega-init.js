// Draws every chart of a page. Each container ends with data-state "drawn", "empty" or "failed", and data-marks.
(function () {
  "use strict";

  const OPTIONS = {
    renderer: "svg",
    actions: { export: true, source: false, compiled: false, editor: false },
  };

  const AXIS = 90;  // pixels beside a plot for its axis, or for the legend

  // A single view follows the width of the page. Plots side by side shrink to fit or, on a phone, stand below each
  // other. Facets and repeats keep their width and scroll.
  function fit(spec, width) {
    const encoding = spec.encoding || {};
    if (["facet", "repeat", "spec", "concat"].some((key) => key in spec)) return spec;
    if (["row", "column", "facet"].some((key) => key in encoding)) return spec;
    const beside = spec.hconcat || spec.vconcat;
    if (!beside) {
      if (spec.width === undefined || typeof spec.width === "number") {
        spec.width = "container";
        spec.autosize = { type: "fit-x", contains: "padding" };
      }
      return spec;
    }
    if (!beside.every((view) => typeof view.width === "number")) return spec;
    if (spec.hconcat && width / beside.length < 280) {
      spec.vconcat = beside;
      delete spec.hconcat;
    }
    const across = spec.hconcat ? beside.length : 1;
    const wanted = spec.hconcat ? beside.reduce((sum, view) => sum + view.width, 0) : Math.max(...beside.map((v) => v.width));
    const factor = Math.min(1, (width - AXIS * (across + 1)) / wanted);
    beside.forEach((view) => { view.width = Math.max(120, Math.floor(view.width * factor)); });
    return spec;
  }

  function countMarks(view) {
    let marks = 0;
    view.querySelectorAll("svg g.role-mark:not(.mark-group)").forEach(function (group) {
      Array.from(group.children).forEach(function (shape) {
        const path = shape.getAttribute("d");
        if (shape.tagName !== "path" || (path && path.indexOf("NaN") < 0)) marks += 1;
      });
    });
    return marks;
  }

  function fail(box, state, reason) {
    box.dataset.state = state;
    const note = document.createElement("p");
    note.className = "escher-vega-note";
    note.textContent = "Chart " + JSON.stringify(box.getAttribute("aria-label")) + " is not shown: " + reason;
    box.appendChild(note);
    console.error(note.textContent);
  }

  function draw(box) {
    if (box.dataset.state) return;
    box.dataset.state = "drawing";
    const view = document.createElement("div");
    view.className = "escher-vega-view";
    box.appendChild(view);
    if (typeof window.vegaEmbed !== "function") return fail(box, "failed", "vega-bundle.js did not load");
    let spec;
    try {
      spec = fit(JSON.parse(box.querySelector("script").textContent), box.clientWidth);
      spec.description = spec.description || box.getAttribute("aria-label");
    } catch (error) {
      return fail(box, "failed", error.message);
    }
    window.vegaEmbed(view, spec, OPTIONS).then(
      function (result) {
        box.dataset.marks = String(countMarks(view));
        if (box.dataset.marks === "0") fail(box, "empty", "it has no marks");
        else box.dataset.state = "drawn";
        let width = box.clientWidth;
        new ResizeObserver(function () {  // Vega listens to the window only; a folded side bar resizes the box
          if (Math.abs(box.clientWidth - width) < 2) return;
          width = box.clientWidth;
          result.view.resize();
          window.dispatchEvent(new Event("resize"));
        }).observe(box);
      },
      function (error) { fail(box, "failed", error.message); }
    );
  }

  function start() {
    document.querySelectorAll(".escher-vega").forEach(function (box) {
      if (box.clientWidth > 0) return draw(box);
      new ResizeObserver(function (_, observer) {  // inside something folded: wait until it has a width
        if (box.clientWidth > 0) { observer.disconnect(); draw(box); }
      }).observe(box);
    });
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
