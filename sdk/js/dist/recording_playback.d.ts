import { TurboServeError } from "./errors.js";
import type { Recording } from "./recording.js";
/** One segment of a recording. Times are seconds of the whole recording. */
interface Segment {
    name: string;
    /** Name of the init segment that decodes it. */
    init: string;
    /** Where the part begins that it belongs to. */
    offset: number;
    start: number;
    end: number;
}
/**
 * Plays a recording in a `<video>`: fetches the segments that the playhead needs. For browsers.
 *
 * Seeking, pausing and the length are the `<video>`'s own. A recording that still grows plays on.
 */
export declare class RecordingPlayback {
    #private;
    /** `onError`: nothing more will be played. */
    constructor(recording: Recording, video: HTMLVideoElement, onError?: (error: TurboServeError) => void);
    /** Leave the video. */
    close(): void;
}
/** Read an HLS media playlist of the gateway. Times are seconds of the whole recording. */
export declare function segmentsOf(playlist: string): {
    segments: Segment[];
    isComplete: boolean;
};
export {};
