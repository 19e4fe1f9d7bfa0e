// What the tests ask of a page in the browser: an object of functions.
({
  // [contrast ratio, text] of every visible text, and of the charts' colours times 1.5: text wants
  // 4.5, lines want 3.
  contrast() {
    const numbers = (text) => (text.match(/[\d.]+/g) || []).map(Number);
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = (c) => {
      const [r, g, b] = c.map((v) => linear(v / 255));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
      for (let at = element; at; at = at.parentElement) {
        const found = numbers(getComputedStyle(at).backgroundColor);
        if (found.length === 3 || found[3] === 1) return found.slice(0, 3);
      }
      return [255, 255, 255];
    };
    const ratio = (a, b) => {
      const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
      return (high + 0.05) / (low + 0.05);
    };
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
      const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
      if (!own || !element.checkVisibility() || element.disabled) continue;
      const drawn = element.closest("svg");
      const style = getComputedStyle(element);
      const ink = numbers(drawn ? style.fill : style.color).slice(0, 3);
      const action = drawn && element.classList.contains("action");
      const cell = action && element.parentElement.querySelector("rect");
      const under = drawn ? drawn.parentElement : element;
      const ground = cell ? numbers(getComputedStyle(cell).fill) : behind(under);
      found.push([ratio(ink, ground), element.textContent.trim().slice(0, 40)]);
    }
    const probe = document.createElement("span");
    const card = behind(document.querySelector(".card"));
    document.body.append(probe);
    for (const name of ["--c1", "--c2", "--c3", "--c4"]) {
      probe.style.color = `var(${name})`;
      found.push([1.5 * ratio(numbers(getComputedStyle(probe).color), card), name]);
    }
    probe.remove();
    return found;
  },

  // Show all that is or will be hidden or closed, so that it is in the accessibility tree.
  reveal() {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync("[hidden] { display: block !important; }");
    document.adoptedStyleSheets.push(sheet);
    for (const element of document.querySelectorAll("details, dialog")) element.open = true;
  },

  // References to elements that are not there.
  dangling() {
    return ["aria-labelledby", "aria-describedby", "for"].flatMap((name) =>
      [...document.querySelectorAll(`[${name}]`)]
        .map((e) => e.getAttribute(name))
        .filter((id) => !document.getElementById(id)),
    );
  },

  // Note where the focus is: false where it is on nothing.
  stop() {
    const at = document.activeElement;
    if (at === document.body) return false;
    window.stops = [...(window.stops ?? []), at];
    return true;
  },

  // What can have the focus and is seen, yet was no stop, was more than one, or is not seen.
  passed() {
    const all = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")];
    const wanted = all.filter((e) => e.checkVisibility({ visibilityProperty: true }) && !e.disabled);
    const odd = [...new Set([...wanted, ...window.stops])].filter(
      (e) => !wanted.includes(e) || window.stops.filter((one) => one === e).length !== 1,
    );
    return odd.map((e) => e.outerHTML.slice(0, 80));
  },

  // Pairs of one stop and the next that are not in reading order. What counts is where their ways
  // part: of the two boxes inside the smallest one that holds both, the second is below the first
  // or, beside it, to its right.
  backward() {
    const box = (e) => e.getBoundingClientRect();
    const toward = (outer, e) => (e.parentElement === outer ? e : toward(outer, e.parentElement));
    const inOrder = (a, b) => {
      let outer = a;
      while (!outer.contains(b)) outer = outer.parentElement;
      if (outer === a) return true;
      const [first, second] = [box(toward(outer, a)), box(toward(outer, b))];
      const beside = second.bottom > first.top + 1;
      return first.bottom <= second.top + 1 || (beside && first.right <= second.left + 1);
    };
    const pairs = window.stops.slice(1).map((e, i) => [window.stops[i], e]);
    const wrong = pairs.filter(([a, b]) => !inOrder(a, b));
    return wrong.map((pair) => pair.map((e) => e.outerHTML.slice(0, 80)).join(" then "));
  },

  // Whether the browser refuses HTML from strings and scripts that are written in.
  refusals() {
    const html = () => (document.body.innerHTML = "<b>x</b>");
    const script = () => {
      const made = document.createElement("script");
      made.text = "window.ran = true";
      document.body.append(made);
      if (!window.ran) throw new Error("did not run");
    };
    return [html, script].map((work) => {
      try {
        work();
        return "allowed";
      } catch {
        return "refused";
      }
    });
  },
})
