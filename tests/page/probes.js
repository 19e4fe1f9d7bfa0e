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

  // Controls, regions and pictures that a screen reader has no name for.
  nameless() {
    const roles = ["region", "group", "img", "log"].map((role) => `[role=${role}]`);
    const controls = ["button", "input", "select", "textarea", "a", "meter", "progress", "dialog"];
    const text = (id) => document.getElementById(id)?.textContent.trim();
    const named = (e) =>
      e.ariaLabel ||
      e.textContent.trim() ||
      e.labels?.length ||
      (e.getAttribute("aria-labelledby") || "").split(" ").some(text);
    const all = [...document.querySelectorAll([...controls, ...roles].join())];
    return all.filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 80));
  },

  // References to elements that are not there.
  dangling() {
    return ["aria-labelledby", "aria-describedby", "for"].flatMap((name) =>
      [...document.querySelectorAll(`[${name}]`)]
        .map((e) => e.getAttribute(name))
        .filter((id) => !document.getElementById(id)),
    );
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
