"""`turboserve bench sequence-parallel`: one session's forwards on one worker and on two."""
