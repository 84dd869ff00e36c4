"""pjit: functions of arrays as programs over many devices."""
