// What a model understands of a prompt, as `/v1/models` describes it: reads a prompt, and writes one from choices.

import { counted } from "./words.js";

const WORD = /[a-z]+|[0-9]+/g;

/** Characters of an unknown word that a warning shows. */
const SHOWN = 30;

export class PromptReader {
  constructor(model) {
    this.model = model.id;
    this.guide = model.prompt_guide;
    this.#known = new Set(this.guide.other_words);
    for (const { kind, choices } of this.guide.kinds) {
      for (const choice of choices) {
        for (const text of [choice.text, ...choice.synonyms]) {
          const words = text.split(" ");
          this.#phrases.push({ kind, choice: choice.text, words });
          for (const word of words) this.#known.add(word);
        }
      }
    }
    this.#phrases.sort((a, b) => b.words.length - a.words.length);
  }

  #known;
  #phrases = [];

  // found: [{kind, choice, from, to}] in the order of the text, places in characters. unknown: words.
  read(text) {
    const words = [...text.toLowerCase().matchAll(WORD)].map((match) => ({
      word: match[0],
      from: match.index,
      to: match.index + match[0].length,
    }));
    const found = [];
    const unknown = [];
    for (let at = 0; at < words.length; ) {
      const phrase = this.#phrases.find((each) => each.words.every((word, n) => words[at + n]?.word === word));
      if (phrase) {
        const last = at + phrase.words.length - 1;
        found.push({ kind: phrase.kind, choice: phrase.choice, from: words[at].from, to: words[last].to, at, last });
        at = last + 1;
      } else {
        if (!this.#known.has(words[at].word)) unknown.push(words[at].word);
        at += 1;
      }
    }
    const isSubject = ({ kind }) => this.guide.subjects.includes(kind);
    return {
      found,
      unknown: [...new Set(unknown)],
      tooLong: words.length > this.guide.words_limit,
      isEmpty: words.length === 0,
      showsNothing: !found.some(isSubject),
      misplaced: found.some((each, n) => isMisplaced(each, found[n - 1], found[n + 1], words)),
    };
  }

  // What is to be known of the prompt before it is sent, as sentences; empty: nothing.
  warnings(text) {
    const { unknown, tooLong, isEmpty, showsNothing, misplaced } = this.read(text);
    if (isEmpty) return [];
    const all = [];
    if (unknown.length) {
      const ignored = unknown.length === 1 ? "ignores it" : "ignores them";
      all.push(`${this.model} does not know ${listed(unknown)} and ${ignored}.`);
    }
    if (showsNothing) all.push(`It finds nothing to draw: name a ${this.guide.subjects.join(" or a ")}.`);
    if (misplaced) all.push(...this.guide.notes);
    if (tooLong) all.push(`It reads the first ${this.guide.words_limit} words.`);
    return all;
  }

  // The text with this choice: in the place of the first of its kind, or as a whole new prompt. A prompt with
  // several figures is never composed: the pattern has only one.
  withChoice(text, kind, choice) {
    const { found } = this.read(text);
    const old = found.find((each) => each.kind === kind);
    if (old && old.choice !== choice) return withArticles(text.slice(0, old.from) + choice + text.slice(old.to));
    if (new Set(found.map((each) => each.kind)).size < found.length) return text;
    const chosen = new Map();
    for (const each of [...found].reverse()) chosen.set(each.kind, each.choice);
    if (old) chosen.delete(kind);
    else chosen.set(kind, choice);
    return this.#compose(chosen);
  }

  #compose(chosen) {
    if (!chosen.size) return "";
    const parts = [];
    let isAfterWord = false;
    for (const part of this.guide.pattern.split(" ")) {
      const kind = /^\{(\w+)\}$/.exec(part)?.[1];
      const wasAfterWord = isAfterWord;
      isAfterWord = !kind;
      if (!kind) {
        parts.push(part);
        continue;
      }
      const needed = kind === this.guide.subjects.at(-1);
      const choice = chosen.get(kind) ?? (needed && this.#defaultOf(kind));
      if (choice) parts.push(choice);
      // "over" without a scene
      else if (wasAfterWord && parts.length > 1 && this.guide.pattern.endsWith(part)) parts.pop();
    }
    return withArticles(parts.join(" "));
  }

  #defaultOf(name) {
    return this.guide.kinds.find(({ kind }) => kind === name).default;
  }
}

// Colors that only scenes have.
const SCENE_COLORS = new Set(["white", "gray", "grey", "black", "navy"]);

// The color of a scene directly before a shape, or behind it with "in": the model cannot paint the shape so.
function isMisplaced(each, before, after, words) {
  if (!SCENE_COLORS.has(words[each.at].word)) return false;
  if (after?.kind === "shape" && after.at === each.last + 1) return true;
  return before?.kind === "shape" && each.at === before.last + 2 && words[each.at - 1].word === "in";
}

function withArticles(text) {
  return text.replace(/\b(a|an) (?=([a-z]))/gi, (_, article, next) =>
    `${article[0]}${"aeiou".includes(next.toLowerCase()) ? "n" : ""} `);
}

function listed(words) {
  const short = (word) => (word.length > SHOWN ? `${word.slice(0, SHOWN)}…` : word);
  const quoted = words.slice(0, 4).map((word) => `“${short(word)}”`);
  if (words.length > 4) return `${quoted.join(", ")} and ${counted(words.length - 4, "more word")}`;
  return quoted.length > 1 ? `${quoted.slice(0, -1).join(", ")} and ${quoted.at(-1)}` : quoted[0];
}
