"""Inputs: sources, rows, demand of a day, forecasts, price watch. Owns how data comes in; the gate judges it.

Must not import the catalogue: names that are known come in as arguments.

API::

    sources    FileSource, FolderSource, S3PrefixSource (files); PrometheusSource (prometheus);
               TraceSource (trace_source); AwsPrices, AwsAvailability (aws); InventorySource (agents);
               CachedSource: (now) -> SourceBatch
    rows       demand_rows, price_rows, availability_rows, fleet_of: accepted Arrow table -> domain rows; *_table back
    demand_day read_demand_day(setup), demand_at(day, moment), demand_history, read_demo_availability
    trace_file  read_trace: a request trace with every bad row named; read_log: one that still grows
    trace_logs  read_logs: one log of one file, of a folder or of those that a pattern names
    trace_demand  derive_day: an hour's trace -> a day of 5-minute intervals
    forecast   last_value, seasonal_naive, smoothed, backtest
    price_watch  watch(previous state, prices, used) -> (state, changed pools)
"""
