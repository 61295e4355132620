"""How the log is made: definitions, records, statistics, tables, pages and figures."""
