"""Reading traces and records: tables and figures. Nothing here runs a model."""
