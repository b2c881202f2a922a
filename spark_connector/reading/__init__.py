"""Reading: the driver plans ranges, executors read them."""
