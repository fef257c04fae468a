//! The result of one check.

pub struct Finding {
    pub name: &'static str,
    pub needed_for: &'static str,
    pub result: Result<String, String>,
    pub required: bool,
}
