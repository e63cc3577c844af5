import type { ChunkMessage } from "./models.js";
export declare class LivePlayback {
    #private;
    constructor(video: HTMLVideoElement, onChange: () => void, onFirstFrame: () => void);
    started: boolean;
    stalled: boolean;
    playhead: number;
    get supported(): boolean;
    /** Nothing is buffered here: the gateway has what comes next. */
    get ahead(): number;
    get wanted(): boolean;
    reset(): void;
    /** Leave the `<video>` to another playback. */
    release(): void;
    track(track: MediaStreamTrack): void;
    beginAt(seconds: number): void;
    init(): void;
    chunk(message: ChunkMessage): void;
    skip(): void;
    play(): void;
    pause(): void;
    finish(): void;
}
