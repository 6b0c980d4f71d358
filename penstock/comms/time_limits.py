"""All times and counts of the package `comms`: intervals between checks, and time limits."""

from datetime import timedelta

# A wait for another rank.
DEFAULT_TIMEOUT = timedelta(minutes=10)  # torch's own 30 minutes are a long wait for a job that hangs
LONG_WAIT_HEARTBEATS = 60  # 30 s: then a rank prints which rank it waits for
ABORT_CHECK_MILLISECONDS = 500.0  # between two checks whether a wait for a message in shared memory was aborted

# The store.
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 2e-4, 5e-3  # between two reads; the longer a wait has lasted, the fewer

# The heartbeat. Counted in beats, not in seconds: if the whole job is suspended and continued, no rank has missed a beat.
HEARTBEAT_SECONDS = 0.5
SUSPENDED_AFTER_MISSED_BEATS = 4  # then a rank whose process is suspended is lost
SILENT_AFTER_MISSED_BEATS = 240  # 2 minutes: then a rank of another machine, whose process cannot be seen, is lost

# The failure of a step.
DEPARTURE_LAG_SECONDS = 0.2  # from the moment a rank's connections close until the store has the reason
REPORT_GRACE_SECONDS = 1.0  # in which a failing rank waits for the reports of the others
DEPARTED_WORK_SECONDS = 1.0  # in which a message arrives that a rank sent before it left

# Ranks that `launch` has started.
ERROR_REPORT_SECONDS = 2.0  # in which the other ranks report their errors once one has failed
ERROR_REPORT_SECONDS_BEFORE_RESTART = 0.5  # the same if the failed rank is known and all ranks are to be restarted
RANK_EXIT_SECONDS = 0.2  # in which finished ranks release semaphores and files in /tmp
KILL_SUSPENDED_AFTER_CHECKS = 6  # in a row, a heartbeat apart, that find a rank's process suspended; then it is killed
FORKSERVER_CHECK_SECONDS = 0.5  # between two checks of the fork server whether its program has ended

# Signals.
REPEATED_SIGNAL_SECONDS = 2.0  # a scheduler and a launcher may both forward one signal: within this time it counts once
