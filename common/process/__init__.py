"""What every process needs: settings, addresses, logs, traces, workers. No server code."""
