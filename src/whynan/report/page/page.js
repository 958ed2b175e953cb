// The live parts of the page: theme, charts, choice of an incident, copy buttons. All data is in the page.
(function () {
  "use strict";
  var root = document.documentElement;
  var live = document.querySelector(".live");
  var charts = []; // every group of charts, to be drawn anew when colours or widths change

  function say(text) { live.textContent = text; }
  function css(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }

  // -- theme -----------------------------------------------------------------------------------------------------

  var theme = document.querySelector(".theme");
  function showTheme() {
    var dark = root.dataset.theme === "dark";
    theme.setAttribute("aria-pressed", String(dark));
    charts.forEach(function (group) { group.draw(); });
  }
  theme.hidden = false;
  theme.addEventListener("click", function () {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("whynan-theme", root.dataset.theme); } catch (error) { /* storage may be closed */ }
    showTheme();
  });

  // -- copying ---------------------------------------------------------------------------------------------------

  function copyByHand(text) {
    var area = document.createElement("textarea");
    area.value = text;
    area.className = "hidden";
    document.body.appendChild(area);
    area.select();
    var done = document.execCommand("copy");
    area.remove();
    return done;
  }
  function copied(button, done) {
    var label = button.firstChild, before = "Copy";
    label.textContent = done ? "Copied" : "Not copied";
    say(done ? "The diff is on the clipboard." : "The browser refused to copy; select the text instead.");
    setTimeout(function () { label.textContent = before; }, 1500);
  }
  document.querySelectorAll(".copy").forEach(function (button) {
    button.hidden = false;
    button.addEventListener("click", function () {
      var text = button.parentNode.querySelector("pre").textContent;
      var given = navigator.clipboard ? navigator.clipboard.writeText(text) : Promise.reject();
      given.then(function () { copied(button, true); }, function () { copied(button, copyByHand(text)); button.focus(); });
    });
  });

  // -- one run ---------------------------------------------------------------------------------------------------

  function Run(section, data) {
    var self = this;
    this.section = section;
    this.data = data;
    this.plots = [];
    this.log = true;
    this.chosen = 0; // number of the kind
    this.step = data.incidents.length ? data.incidents[0][0] : null;
    this.range = null; // of steps; null: all
    section.addEventListener("click", function (event) {
      var link = event.target.closest("[data-select]");
      if (link) {
        event.preventDefault();
        self.select(Number(link.dataset.select), Number(link.dataset.step), true);
      }
      var zoom = event.target.closest("[data-zoom]");
      if (zoom) self.zoom(zoom.dataset.zoom);
    });
    var log = section.querySelector(".log");
    if (log) log.addEventListener("change", function () { self.log = log.checked; self.draw(); });
    section.querySelectorAll(".tools, .hint, .track").forEach(function (part) { part.hidden = !data.steps.length || !Object.keys(data.series).length; });
    this.select(this.chosen, this.step, false);
  }

  Run.prototype.select = function (kind, step, move) {
    this.chosen = kind;
    this.step = step;
    this.section.querySelectorAll(".kind").forEach(function (part) { part.classList.toggle("current", Number(part.dataset.kind) === kind); });
    this.section.querySelectorAll("[data-select]").forEach(function (link) {
      var same = Number(link.dataset.step) === step && Number(link.dataset.select) === kind;
      if (same) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    });
    this.plots.forEach(function (plot) { plot.redraw(false); });
    if (move) {
      var target = this.section.querySelector(".diagnosis.current");
      say("Showing step " + step + ": " + target.querySelector("h2, h3").textContent);
      target.focus({ preventScroll: true });
      target.scrollIntoView({ block: "nearest" });
    }
  };

  function numbers(values) { // a value that is not finite is a gap (null); one that is not known is bridged (undefined)
    return values.map(function (value) { return typeof value === "number" ? value : value === null ? undefined : null; });
  }

  Run.prototype.draw = function () {
    var self = this;
    this.plots.forEach(function (plot) { plot.destroy(); });
    this.plots = [];
    var places = this.section.querySelectorAll(".plot");
    places.forEach(function (place, index) { self.plots.push(self.plot(place, index === places.length - 1)); });
    this.mark();
  };

  Run.prototype.plot = function (place, last) {
    var self = this, key = place.dataset.series, raw = this.data.series[key], values = numbers(raw);
    var positive = raw.every(function (v) { return typeof v !== "number" || v > 0; });
    var log = this.log && positive && key !== "headroom";
    var readout = place.closest("figure").querySelector(".readout");
    var line = css("--line"), muted = css("--muted"), font = "11px system-ui, sans-serif";
    var axis = { stroke: muted, font: font, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 } };
    var plot = new uPlot({
      width: this.width(place), height: last ? 98 : 74,
      legend: { show: false }, padding: [8, 8, 0, 0],
      cursor: { sync: { key: this.section.id }, y: false, drag: { x: true, y: false, setScale: true }, points: { size: 6 } },
      scales: { x: { time: false, range: function (u, min, max) { return min === max ? [min - 1, max + 1] : [min, max]; } },
                y: log ? { distr: 3, range: function (u, min, max) { return min > 0 ? [min / 1.25, max * 1.25] : [0.1, 1]; } } : { range: function (u, min, max) { return spread(min, max, key === "headroom"); } } },
      axes: [Object.assign({}, axis, { incrs: WHOLE, size: last ? 26 : 6, values: last ? undefined : function (u, found) { return found.map(function () { return ""; }); } }),
             Object.assign({}, axis, { size: 58, space: 20, splits: log ? powers : undefined, filter: function (u, found) { return found; }, values: function (u, found) { return found.map(label); } })],
      series: [{}, { stroke: css("--curve"), width: 1.5, spanGaps: false,
                     points: { show: false, size: 4, fill: css("--curve"), filter: function (u) { return lonely(u, values); } } }],
      hooks: {
        setScale: [function (u, scale) { if (scale === "x") self.follow(u); }],
        setCursor: [function (u) {
          var at = u.cursor.idx;
          readout.textContent = at === null || at === undefined ? "" : "step " + self.data.steps[at] + ": " + (raw[at] === null ? "not known" : typeof raw[at] === "number" ? label(raw[at]) : raw[at]);
        }],
        draw: [function (u) { self.lines(u, raw); }],
      },
    }, [this.data.steps, values], place);
    plot.over.addEventListener("click", function (event) { self.pick(plot, event); });
    return plot;
  };

  var WHOLE = []; // steps are whole numbers
  for (var power = 1; power < 1e15; power *= 10) WHOLE.push(power, 2 * power, 5 * power);

  function spread(min, max, fromZero) {
    if (min === null || max === null || min === undefined) return [0, 1];
    if (fromZero) min = Math.min(0, min);
    var room = (max - min) * 0.08 || Math.abs(max) * 0.1 || 1;
    return [fromZero && min === 0 ? 0 : min - room, max + room];
  }

  function powers(u, axis, min, max) { // at most a few marks: whole powers of ten, and between them where the range is narrow
    var low = Math.floor(Math.log10(min)), high = Math.ceil(Math.log10(max)), found = [];
    var digits = max / min < 4 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : max / min < 40 ? [1, 2, 5] : [1];
    for (var power = low; power <= high; power++) {
      digits.forEach(function (digit) {
        var value = Number((digit * Math.pow(10, power)).toPrecision(6));
        if (value >= min && value <= max) found.push(value);
      });
    }
    var each = Math.ceil(found.length / 4);
    return found.filter(function (value, index) { return index % each === 0; });
  }

  function label(value) {
    if (value === null || value === undefined) return "";
    var size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }

  function lonely(u, values) { // points that no line would show, and all of them where there are few
    var min = u.scales.x.min, max = u.scales.x.max, steps = u.data[0], found = [], shown = 0;
    for (var i = 0; i < steps.length; i++) if (steps[i] >= min && steps[i] <= max) shown++;
    for (i = 0; i < steps.length; i++) {
      if (steps[i] < min || steps[i] > max || typeof values[i] !== "number") continue;
      if (shown <= 40 || (typeof values[i - 1] !== "number" && typeof values[i + 1] !== "number")) found.push(i);
    }
    return found;
  }

  Run.prototype.width = function (place) { return root.classList.contains("printing") ? 640 : Math.max(place.clientWidth, 200); };

  Run.prototype.lines = function (u, raw) {
    var ctx = u.ctx, box = u.bbox, ratio = devicePixelRatio || 1, bad = css("--bad"), self = this;
    ctx.save();
    ctx.beginPath();
    ctx.rect(box.left, box.top - 6 * ratio, box.width, box.height + 6 * ratio);
    ctx.clip();
    this.data.incidents.forEach(function (incident) {
      var x = Math.round(u.valToPos(incident[0], "x", true)), chosen = incident[0] === self.step;
      ctx.globalAlpha = chosen ? 1 : 0.45;
      ctx.fillStyle = bad;
      ctx.fillRect(x - (chosen ? ratio : ratio / 2), box.top, chosen ? 2 * ratio : ratio, box.height);
    });
    ctx.globalAlpha = 1;
    raw.forEach(function (value, index) {
      if (typeof value === "string") {
        ctx.fillStyle = bad;
        ctx.fillRect(u.valToPos(u.data[0][index], "x", true) - 2 * ratio, box.top - 5 * ratio, 4 * ratio, 5 * ratio);
      }
    });
    ctx.restore();
  };

  Run.prototype.pick = function (plot, event) {
    var x = event.clientX - plot.over.getBoundingClientRect().left, best = null, self = this;
    this.data.incidents.forEach(function (incident) {
      var away = Math.abs(plot.valToPos(incident[0], "x") - x);
      if (away <= 10 && (best === null || away < best[0])) best = [away, incident];
    });
    if (best) self.select(best[1][1], best[1][0], true);
  };

  // -- zoom ------------------------------------------------------------------------------------------------------

  Run.prototype.follow = function (from) {
    if (this.following || from.scales.x.min === null || from.scales.x.min === undefined) return;
    var self = this, range = { min: from.scales.x.min, max: from.scales.x.max };
    this.following = true;
    this.plots.forEach(function (plot) {
      if (plot !== from && (plot.scales.x.min !== range.min || plot.scales.x.max !== range.max)) plot.setScale("x", range);
    });
    this.following = false;
    requestAnimationFrame(function () { self.mark(); });
  };

  Run.prototype.zoom = function (how) {
    if (!this.plots.length) return;
    var steps = this.data.steps, first = steps[0], last = steps[steps.length - 1], x = this.plots[0].scales.x;
    var min = x.min, max = x.max, wide = max - min, middle = (min + max) / 2;
    if (how === "in" && this.step !== null && this.step >= min && this.step <= max) middle = this.step;
    if (how === "in") { min = middle - wide / 4; max = middle + wide / 4; }
    if (how === "out") { min = middle - wide; max = middle + wide; }
    if (how === "left") { min -= wide / 4; max -= wide / 4; }
    if (how === "right") { min += wide / 4; max += wide / 4; }
    if (how === "all") { min = first; max = last; }
    if (min < first) { max = Math.min(last, max + first - min); min = first; }
    if (max > last) { min = Math.max(first, min - (max - last)); max = last; }
    if (max - min < 2 && how === "in") return;
    this.plots[0].setScale("x", { min: min, max: max });
    say("Steps " + Math.round(min) + " to " + Math.round(max));
  };

  // -- the marks above the charts -----------------------------------------------------------------------------------

  Run.prototype.mark = function () {
    var track = this.section.querySelector(".track"), plot = this.plots[0];
    if (!track || !plot) return;
    var held = track.contains(document.activeElement) ? document.activeElement.dataset.step : null;
    var groups = [], left = plot.bbox.left / (devicePixelRatio || 1), wide = plot.bbox.width / (devicePixelRatio || 1);
    this.data.incidents.forEach(function (incident) {
      var x = plot.valToPos(incident[0], "x");
      if (x < -1 || x > wide + 1) return;
      var last = groups[groups.length - 1];
      if (last && x - last.x < 24) last.more.push(incident); else groups.push({ x: x, incident: incident, more: [] });
    });
    track.textContent = "";
    groups.forEach(function (group) {
      var button = document.createElement("button"), more = group.more.length;
      button.type = "button";
      button.dataset.select = group.incident[1];
      button.dataset.step = group.incident[0];
      button.setAttribute("aria-label", group.incident[2] + (more ? ", and " + more + " more close to it" : ""));
      button.title = button.getAttribute("aria-label");
      button.textContent = more ? String(more + 1) : "";
      button.style.left = left + group.x + "px";
      track.appendChild(button);
      if (String(group.incident[0]) === held) button.focus();
    });
    var chosen = this.step, kind = this.chosen;
    track.querySelectorAll("button").forEach(function (button) {
      if (Number(button.dataset.step) === chosen && Number(button.dataset.select) === kind) button.setAttribute("aria-current", "true");
    });
  };

  // -- start -----------------------------------------------------------------------------------------------------

  var data = JSON.parse(document.getElementById("data").textContent);
  document.querySelectorAll(".run").forEach(function (section, number) { charts.push(new Run(section, data[number])); });
  showTheme();

  var width = window.innerWidth, waiting = 0;
  window.addEventListener("resize", function () {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(showTheme, 80);
  });

  var before = null; // on paper everything is light, and as wide as the paper
  window.addEventListener("beforeprint", function () {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    root.classList.add("printing");
    showTheme();
  });
  window.addEventListener("afterprint", function () {
    root.dataset.theme = before || root.dataset.theme;
    root.classList.remove("printing");
    showTheme();
  });

  document.addEventListener("keydown", function (event) { // a tip covers what is under it: Escape takes it away
    if (event.key === "Escape" && document.activeElement.classList.contains("node")) document.activeElement.blur();
  });
})();
