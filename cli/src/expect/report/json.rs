//! The report as one JSON document. Its fields are those of [`Report`], after the version of this
//! form.

use serde::Serialize;

use super::Report;

/// The version of the form. It rises when a field changes its meaning or is removed, but not for a
/// new field.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct Document<'r> {
    version: u32,
    #[serde(flatten)]
    report: &'r Report,
}

/// Returns the document.
///
/// # Errors
/// Never: its keys are text.
pub fn render(report: &Report) -> Result<String, serde_json::Error> {
    let document = Document {
        version: VERSION,
        report,
    };
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}
