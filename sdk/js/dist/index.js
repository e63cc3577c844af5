// The client of TurboServe: sessions, prompts and video. `player.js` has the custom element `<turboserve-player>`.
export { Client, DEFAULT_URL } from "./client.js";
export { StreamConnection } from "./connection.js";
export { ChunkGoneError, GatewayUnreachableError, NoCapacityError, NotFoundError, PlaybackError, ProblemError, ProtocolError, TurboServeError, UnauthorizedError, } from "./errors.js";
export { Recording } from "./recording.js";
export { RecordingPlayback } from "./recording_playback.js";
export { Session } from "./session.js";
export { VideoStream } from "./video_stream.js";
