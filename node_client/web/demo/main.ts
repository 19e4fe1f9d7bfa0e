/** The page: three riddles with a hint each, chosen by the batch's policy. The visitor's answers are the episode. */
import {
  browserDiary,
  InvalidSettings,
  newUser,
  Participant,
  readSettings,
  Refusal,
  Unavailable,
  workerSealer,
  type Participation,
  type PersonLease,
} from "../src/index.js";
import { RIDDLES, RIGHT, SHAPE, START, WRONG } from "./riddles.js";

const WAIT_SECONDS = 20;
const LOOK_SECONDS = 2;

const SENDING = { title: "One moment", text: "Your report is sealed and sent." };

interface Choice {
  readonly label: string;
  readonly kind?: "main" | "quiet";
  readonly act: () => Promise<void>;
}

function part(id: string): HTMLElement {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no ${id}`);
  return found;
}

/** Shows one screen, and moves the focus to its heading. */
function show(screen: { title: string; text: string; hint?: string; intro?: boolean; choices?: readonly Choice[] }): void {
  part("title").textContent = screen.title;
  part("text").textContent = screen.text;
  part("hint").textContent = screen.hint ?? "";
  part("hint").hidden = screen.hint === undefined;
  part("leaves").hidden = screen.intro !== true;
  part("choices").replaceChildren(...(screen.choices ?? []).map(buttonOf));
  say("");
  if (screen.intro !== true) part("title").focus();
  window.scrollTo(0, 0);
}

function buttonOf({ label, kind, act }: Choice): HTMLElement {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = label;
  if (kind !== undefined) button.className = kind;
  button.addEventListener("click", () => {
    for (const each of part("choices").querySelectorAll("button")) each.disabled = true;
    act().catch(fail);
  });
  return button;
}

function say(status: string): void {
  part("status").textContent = status;
}

function fail(error: unknown): void {
  const known = error instanceof Refusal || error instanceof Unavailable || error instanceof InvalidSettings;
  const text = known ? error.message : "Something unexpected went wrong. Nothing about your answers was sent in the clear.";
  if (!known) console.error(error);
  show({ title: "That did not work", text, choices: [{ label: "Try again", kind: "main", act: start }] });
}

let participant: Participant | null = null;

/** Opens the participant once; it holds the diary's lock while the page is open. */
async function open(): Promise<Participant> {
  if (participant !== null) return participant;
  if (!isSecureContext) throw new InvalidSettings("This page must be opened over https, or on this machine.");
  const answer = await fetch("settings.json", { cache: "no-store" }).catch(() => null);
  if (answer?.ok !== true) throw new InvalidSettings("The page's settings.json is missing. Its owner must supply it.");
  const settings = readSettings(await answer.json());
  const seal = workerSealer(new URL("./worker.js", import.meta.url));
  participant = await Participant.open(SHAPE, { settings, seal, diary: await browserDiary("riffle-demo") });
  return participant;
}

async function start(): Promise<void> {
  const opened = await open();
  const entry = (await opened.history())[0];
  await showDiary(opened);
  if (entry !== undefined && entry.episode !== null) await goOn(opened, entry);
  else if (entry !== undefined && entry.outcome !== "asking") await thank(opened, entry.batch);
  else {
    const text = "Three riddles, each with a hint. Your answers help to learn which kind of hint helps people.";
    show({ title: "Which hint helps?", text, intro: true, choices: [{ label: "Take part", kind: "main", act: begin }] });
  }
}

/** Goes on with what a restart interrupted: the riddles, or the upload, which the participant repeats by itself. */
async function goOn(opened: Participant, { batch, episode }: Participation): Promise<void> {
  if (episode?.sealed === null && episode.steps !== null) {
    await begin();
    return;
  }
  show(SENDING);
  while ((await opened.history())[0]?.episode !== null) await pause();
  await thank(opened, batch);
}

function pause(): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, LOOK_SECONDS * 1000));
}

async function begin(): Promise<void> {
  say("Looking for a batch, and checking its promise…");
  const opened = await open();
  const user = (await opened.history())[0]?.user ?? newUser();
  const lease = await opened.lease(user, WAIT_SECONDS);
  await showDiary(opened);
  ask(opened, lease);
}

/** Shows the next riddle with the hint that the policy chose, or sends the report after the last one. */
function ask(opened: Participant, lease: PersonLease): void {
  const riddle = RIDDLES[lease.step];
  if (riddle === undefined) {
    send(opened, lease).catch(fail);
    return;
  }
  const state = lease.state ?? START;
  const answers = [...riddle.answers].sort().map((answer) => ({
    label: answer,
    act: async () => {
      const right = answer === riddle.answers[0];
      await lease.record(state, right ? 1 : 0, right ? RIGHT : WRONG);
      ask(opened, lease);
    },
  }));
  const stop: Choice = { label: "Stop here", kind: "quiet", act: () => end(opened, lease, lease.giveUp()) };
  show({
    title: riddle.question,
    text: `Riddle ${lease.step + 1} of ${RIDDLES.length}`,
    hint: `Hint: ${riddle.hints[lease.act(state)] ?? ""}`,
    choices: [...answers, stop],
  });
}

function send(opened: Participant, lease: PersonLease): Promise<void> {
  return end(opened, lease, lease.report());
}

async function end(opened: Participant, lease: PersonLease, sending: Promise<void>): Promise<void> {
  show(SENDING);
  await sending;
  await thank(opened, lease.participation.batch);
}

/** Thanks, and waits until the batch is complete. */
async function thank(opened: Participant, batch: string): Promise<void> {
  await showDiary(opened);
  const outcome = (await opened.history())[0]?.outcome;
  if (outcome !== "accepted") {
    show({ title: "You were asked before", text: "Everybody is asked once only, and no report of yours was stored." });
    return;
  }
  show({ title: "Thank you", text: "Your report is stored. Everybody takes part once only." });
  say("Waiting for the others of your batch…");
  while (await opened.isOpen(batch)) await pause();
  say("Your batch is complete. Its messages are mixed and counted now.");
}

async function showDiary(opened: Participant): Promise<void> {
  const entry = (await opened.history())[0];
  part("diary").hidden = entry === undefined;
  if (entry === undefined) return;
  const rows = [
    ["Asked", new Date(entry.askedAt * 1000).toLocaleString()],
    ["Batch", entry.batch],
    ["Promise", `epsilon ${entry.epsilon.toPrecision(3)} at beta ${entry.beta}`],
    ["Report", entry.outcome === "asked" ? "not sent yet" : entry.outcome],
    ["Your id at the shuffler", entry.user],
  ];
  const cell = (tag: "dt" | "dd", text: string): HTMLElement => Object.assign(document.createElement(tag), { textContent: text });
  part("entries").replaceChildren(...rows.flatMap(([name, value]) => [cell("dt", name ?? ""), cell("dd", value ?? "")]));
}

start().catch(fail);
