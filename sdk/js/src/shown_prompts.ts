// Which prompt the frame on the screen was generated under, and how long after its sending it appeared.

const KEPT = 400;

interface Mark<Prompt> {
  index: number;
  prompt: Prompt;
  promptId: string;
}

/** A prompt that is on screen. */
export interface ShownPrompt<Prompt> extends Mark<Prompt> {
  /** Time since it was sent; null: this page has not sent it. */
  seconds: number | null;
}

export class ShownPrompts<Prompt = string> {
  // onChange: another prompt is on screen.
  constructor(onChange: (shown: ShownPrompt<Prompt>) => void) {
    this.#onChange = onChange;
  }

  #onChange: (shown: ShownPrompt<Prompt>) => void;
  #starts = new Map<number, number>();
  #marks: Mark<Prompt>[] = [];
  #sent = new Map<string, number>();
  #shown: Mark<Prompt> | null = null;
  #first: number | null = null;

  reset(): void {
    this.#starts.clear();
    this.#marks = [];
    this.#sent.clear();
    this.#shown = this.#first = null;
  }

  // This page has just sent the prompt.
  sent(promptId: string, atMs: number): void {
    this.#sent.set(promptId, atMs);
  }

  // The prompt is that of chunk `index` and of those after it.
  applied(index: number, prompt: Prompt, promptId: string): void {
    // A reconnection repeats what is known.
    if (this.#marks.some((mark) => mark.index === index && mark.promptId === promptId)) return;
    this.#marks = [...this.#marks.filter((mark) => mark.index !== index), { index, prompt, promptId }];
    this.#marks.sort((a, b) => a.index - b.index);
  }

  chunk(index: number, startS: number): void {
    this.#first ??= index;
    this.#starts.set(index, startS);
    if (this.#starts.size <= KEPT) return;
    this.#starts.delete(this.#first);
    this.#first = this.#starts.keys().next().value!;
  }

  // Playback is at `playheadS`.
  look(playheadS: number): void {
    const mark = this.#marks.findLast(({ index }) => this.#startOf(index) <= playheadS + 0.01);
    if (!mark || mark === this.#shown) return;
    this.#shown = mark;
    const sentMs = this.#sent.get(mark.promptId);
    this.#sent.delete(mark.promptId);
    this.#onChange({ ...mark, seconds: sentMs === undefined ? null : (performance.now() - sentMs) / 1000 });
  }

  #startOf(index: number): number {
    if (this.#first === null) return Infinity;
    // A chunk from before this page began to watch, or one that is not kept any more.
    return this.#starts.get(index) ?? (index < this.#first ? -Infinity : Infinity);
  }
}
