import { PlaybackError } from "./errors.js";
import type { ChunkMessage, Init } from "./models.js";
export declare class Playback {
    #private;
    stalled: boolean;
    started: boolean;
    constructor(video: HTMLVideoElement, onChange: () => void, onFirstFrame: () => void, onError: (error: PlaybackError) => void);
    reset(): void;
    /** Leave the `<video>` to another playback. */
    release(): void;
    get supported(): boolean;
    get playhead(): number;
    get ahead(): number;
    get wanted(): boolean;
    beginAt(seconds: number): void;
    init(message: Init, data: ArrayBuffer): void;
    chunk(message: ChunkMessage, data: ArrayBuffer): void;
    skip(seconds: number): void;
    play(): void;
    pause(): void;
    finish(): void;
}
