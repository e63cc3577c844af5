// Which prompt the frame on the screen was generated under, and how long after its sending it appeared.
const KEPT = 400;
export class ShownPrompts {
    // onChange: another prompt is on screen.
    constructor(onChange) {
        this.#onChange = onChange;
    }
    #onChange;
    #starts = new Map();
    #marks = [];
    #sent = new Map();
    #shown = null;
    #first = null;
    reset() {
        this.#starts.clear();
        this.#marks = [];
        this.#sent.clear();
        this.#shown = this.#first = null;
    }
    // This page has just sent the prompt.
    sent(promptId, atMs) {
        this.#sent.set(promptId, atMs);
    }
    // The prompt is that of chunk `index` and of those after it.
    applied(index, prompt, promptId) {
        // A reconnection repeats what is known.
        if (this.#marks.some((mark) => mark.index === index && mark.promptId === promptId))
            return;
        this.#marks = [...this.#marks.filter((mark) => mark.index !== index), { index, prompt, promptId }];
        this.#marks.sort((a, b) => a.index - b.index);
    }
    chunk(index, startS) {
        this.#first ??= index;
        this.#starts.set(index, startS);
        if (this.#starts.size <= KEPT)
            return;
        this.#starts.delete(this.#first);
        this.#first = this.#starts.keys().next().value;
    }
    // Playback is at `playheadS`.
    look(playheadS) {
        const mark = this.#marks.findLast(({ index }) => this.#startOf(index) <= playheadS + 0.01);
        if (!mark || mark === this.#shown)
            return;
        this.#shown = mark;
        const sentMs = this.#sent.get(mark.promptId);
        this.#sent.delete(mark.promptId);
        this.#onChange({ ...mark, seconds: sentMs === undefined ? null : (performance.now() - sentMs) / 1000 });
    }
    #startOf(index) {
        if (this.#first === null)
            return Infinity;
        // A chunk from before this page began to watch, or one that is not kept any more.
        return this.#starts.get(index) ?? (index < this.#first ? -Infinity : Infinity);
    }
}
