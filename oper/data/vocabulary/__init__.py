"""From raw values to ids, in one run or over many."""
