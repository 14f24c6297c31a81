// The chat page: one conversation over POST /v1/chat/completions. Text of a model only ever becomes text nodes.

const at = (id) => document.getElementById(id);
const log = at("log");
const KEPT = ["system", "temperature", "max-tokens", "key"];

let history = []; // what the model is sent: {role, content}
let running = null; // AbortController of the answer that comes now

// ---------------------------------------------------------------- elements

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function atBottom() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function toBottom() {
  log.scrollTop = log.scrollHeight;
}

// ---------------------------------------------------------------- markdown, a small and safe part of it

// One alternative for each kind of span: `code`, **strong**, *emphasis*, [text](http...)
const SPAN = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/g;

function spans(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(SPAN)) {
    const [all, code, strong, emphasis, label, address] = found;
    nodes.push(text.slice(end, found.index));
    end = found.index + all.length;
    if (code !== undefined) nodes.push(element("code", {}, code));
    else if (strong !== undefined) nodes.push(element("strong", {}, strong));
    else if (emphasis !== undefined) nodes.push(element("em", {}, emphasis));
    else nodes.push(element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label));
  }
  nodes.push(text.slice(end));
  return nodes;
}

// Paragraphs, lists and so on, each as its own source: only those that changed are drawn again.
function blocks(text) {
  const found = [];
  let lines = [];
  let fence = null;
  const flush = () => {
    if (lines.some((line) => line.trim())) found.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = line.match(/^\s*(`{3,}|~{3,})/);
    if (fence) {
      lines.push(line);
      if (mark && mark[1].startsWith(fence)) {
        fence = null;
        flush();
      }
    } else if (mark) {
      flush();
      fence = mark[1];
      lines.push(line);
    } else if (!line.trim()) {
      flush();
    } else {
      lines.push(line);
    }
  }
  flush();
  return found;
}

function drawCode(source) {
  const lines = source.split("\n");
  const language = lines[0].replace(/^\s*[`~]+/, "").trim();
  const closed = lines.length > 1 && /^\s*[`~]{3,}\s*$/.test(lines[lines.length - 1]);
  const code = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = element("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  const caption = element("figcaption", {}, element("span", {}, language || "text"), copy);
  return element("figure", { className: "code" }, caption, element("pre", {}, element("code", {}, code)));
}

function drawTable(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, name) => element("tr", {}, ...cells(line).map((cell) => element(name, {}, ...spans(cell))));
  const head = element("thead", {}, row(lines[0], "th"));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return element("div", { className: "table" }, element("table", {}, head, body));
}

function drawBlock(source) {
  if (/^\s*(`{3,}|~{3,})/.test(source)) return drawCode(source);
  const lines = source.split("\n");
  if (lines.length > 1 && lines[0].includes("|") && /^[\s|:-]+$/.test(lines[1]) && lines[1].includes("-")) {
    return drawTable(lines);
  }
  const parts = [];
  let list = null;
  let paragraph = null;
  for (const line of lines) {
    const heading = line.match(/^(#{1,6})\s+(.*)/);
    const bullet = line.match(/^\s*[-*+]\s+(.*)/);
    const number = line.match(/^\s*(\d+)[.)]\s+(.*)/);
    const quote = line.match(/^>\s?(.*)/);
    if (bullet || number) {
      const name = bullet ? "ul" : "ol";
      if (!list || list.localName !== name) {
        list = element(name, number ? { start: Number(number[1]) } : {});
        parts.push(list);
      }
      list.append(element("li", {}, ...spans(bullet ? bullet[1] : number[2])));
      paragraph = null;
    } else if (list && !paragraph && /^\s+\S/.test(line)) {
      list.lastChild.append("\n", ...spans(line.trim()));
    } else if (heading) {
      const level = Math.min(heading[1].length + 2, 5);
      parts.push(element(`h${level}`, {}, ...spans(heading[2])));
      list = paragraph = null;
    } else {
      const name = quote ? "blockquote" : "p";
      if (!paragraph || paragraph.localName !== name) {
        paragraph = element(name);
        parts.push(paragraph);
      } else {
        paragraph.append("\n");
      }
      paragraph.append(...spans(quote ? quote[1] : line));
      list = null;
    }
  }
  return element("div", {}, ...parts);
}

// ---------------------------------------------------------------- one answer on the page

class Answer {
  constructor() {
    this.text = "";
    this.reasoning = "";
    this.tokens = 0; // chunks with text, until the server tells the number
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.drawn = []; // sources of the blocks on the page
    this.frame = 0;
    this.thoughts = element("div");
    this.folded = element("details", { className: "reasoning", hidden: true }, element("summary", {}, "Reasoning"), this.thoughts);
    this.body = element("div", { className: "answer" });
    this.facts = element("p", { className: "facts" }, "…");
    this.whole = element("article", { className: "message assistant" }, this.folded, this.body, this.facts);
    this.whole.setAttribute("aria-busy", "true");
    log.append(this.whole);
  }

  take(delta) {
    const text = delta.content || "";
    const reasoning = delta.reasoning_content || "";
    if (!text && !reasoning) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.tokens += 1;
    this.text += text;
    this.reasoning += reasoning;
    // One drawing for each frame, however many tokens come.
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const follow = atBottom();
    this.folded.hidden = !this.reasoning;
    if (this.thoughts.textContent !== this.reasoning) this.thoughts.textContent = this.reasoning;
    const sources = blocks(this.text);
    sources.forEach((source, i) => {
      if (this.drawn[i] === source) return;
      const made = drawBlock(source);
      if (this.body.children[i]) this.body.children[i].replaceWith(made);
      else this.body.append(made);
    });
    while (this.body.children.length > sources.length) this.body.lastChild.remove();
    this.drawn = sources;
    this.facts.textContent = this.summary();
    if (follow) toBottom();
  }

  summary(ending = "") {
    if (this.first === null) return ending || "…";
    const seconds = (this.last - this.first) / 1000;
    const said = [`${this.tokens} tokens`];
    if (this.tokens > 1 && seconds > 0) said.push(`${((this.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    said.push(`first after ${((this.first - this.began) / 1000).toFixed(2)} s`);
    if (ending) said.push(ending);
    return said.join(" · ");
  }

  end(ending) {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.draw();
    this.facts.textContent = this.summary(ending);
    this.whole.setAttribute("aria-busy", "false");
  }
}

// ---------------------------------------------------------------- the server

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function requestBody() {
  const system = at("system").value.trim();
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    stream: true,
    stream_options: { include_usage: true },
  };
  const temperature = at("temperature").valueAsNumber;
  const maxTokens = at("max-tokens").valueAsNumber;
  if (!Number.isNaN(temperature)) body.temperature = temperature;
  if (!Number.isNaN(maxTokens)) body.max_completion_tokens = maxTokens;
  return body;
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Each event's data, parsed; ends at [DONE] or with the connection.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function stream(answer, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(requestBody()),
    signal,
  });
  if (!response.ok) throw new Error(await failure(response));
  let ending = null;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    if (choice) {
      answer.take(choice.delta);
      ending = choice.finish_reason ?? ending;
    }
    if (event.usage) answer.tokens = event.usage.completion_tokens;
  }
  if (ending === null) throw new Error("the connection ended before the answer did");
  return ending === "length" ? "cut off: the limit of tokens is reached" : "";
}

async function ask(text) {
  at("welcome").hidden = true;
  const mine = history; // a new chat replaces it while this answer is still coming
  mine.push({ role: "user", content: text });
  log.append(element("article", { className: "message user" }, text));
  const answer = new Answer();
  toBottom();
  running = new AbortController();
  show();
  try {
    answer.end(await stream(answer, running.signal));
  } catch (error) {
    const stopped = running.signal.aborted;
    answer.end(stopped ? "stopped" : "failed");
    if (!stopped) log.append(element("p", { className: "message error", role: "alert" }, `Error: ${error.message}`));
  }
  running = null;
  if (answer.text) mine.push({ role: "assistant", content: answer.text });
  else mine.pop();
  show();
  if (atBottom()) toBottom();
  at("text").focus();
}

async function greet() {
  try {
    const health = await (await fetch("health")).json();
    at("key-field").hidden = !health.api_key;
    if (health.api_key && !at("key").value) {
      at("state").textContent = "needs an API key";
      at("settings").showModal();
      at("key").focus();
      return;
    }
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await failure(response));
    const [model] = (await response.json()).data;
    at("model").textContent = model.id;
    document.title = model.id;
    at("state").textContent = "";
  } catch (error) {
    at("state").textContent = error instanceof TypeError ? "server not reached" : error.message;
  }
}

// ---------------------------------------------------------------- controls

function show() {
  at("send").hidden = running !== null;
  at("stop").hidden = running === null;
}

function grow() {
  const box = at("text");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function submit() {
  const text = at("text").value.trim();
  if (!text || running) return;
  at("text").value = "";
  grow();
  ask(text);
}

function stop() {
  running?.abort();
}

function begin() {
  stop();
  history = [];
  log.replaceChildren(at("welcome"));
  at("welcome").hidden = false;
  at("text").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
at("text").addEventListener("input", grow);
at("text").addEventListener("keydown", (event) => {
  // While an input method composes, Enter chooses a word.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
at("stop").addEventListener("click", stop);
at("new").addEventListener("click", begin);
at("open-settings").addEventListener("click", () => at("settings").showModal());
at("settings").addEventListener("close", () => {
  for (const id of KEPT) sessionStorage.setItem(`kt-${id}`, at(id).value);
  greet();
  at("text").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("settings").open) stop();
  if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    begin();
  }
});

for (const id of KEPT) at(id).value = sessionStorage.getItem(`kt-${id}`) ?? "";
greet();
