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
export declare class ShownPrompts<Prompt = string> {
    #private;
    constructor(onChange: (shown: ShownPrompt<Prompt>) => void);
    reset(): void;
    sent(promptId: string, atMs: number): void;
    applied(index: number, prompt: Prompt, promptId: string): void;
    chunk(index: number, startS: number): void;
    look(playheadS: number): void;
}
export {};
