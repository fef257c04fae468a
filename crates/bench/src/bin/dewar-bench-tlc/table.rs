//! What is told: the paper's tables, turned on their side.

use crate::Plan;
use anyhow::Result;
use serde_json::{Value, json};

/// One checkpoint and the restart from it.
#[derive(Debug, Clone, Default)]
pub struct Figures {
    pub total_s: f64,
    /// The longest time without a heartbeat.
    pub longest_pause_ms: f64,
    pub own_pause_ms: Option<f64>,
    /// Until the guest could run with all its memory.
    pub restart_s: f64,
    /// Until it ran, its memory arriving.
    pub lazy_restart_s: Option<f64>,
    pub stored_bytes: u64,
    /// Pages by the bulk pass, skipped by it, sent to the dirty store, copied in
    /// the pause.
    pub captured: Value,
    /// Pages that are in the dirty store in the end.
    pub in_dirty_store: Option<u64>,
    /// From the pause to the complete image.
    pub behind_s: Option<f64>,
    pub epochs: Value,
}

pub struct Column {
    pub method: &'static str,
    pub section: String,
    pub figures: Figures,
}

pub fn save(plan: &Plan, columns: &[Column]) -> Result<()> {
    let list: Vec<Value> = columns
        .iter()
        .map(|Column { method, section, figures: it }| {
            json!({
                "method": method, "section": section, "total_s": it.total_s,
                "longest_pause_ms": it.longest_pause_ms, "own_pause_ms": it.own_pause_ms,
                "restart_s": it.restart_s, "lazy_restart_s": it.lazy_restart_s,
                "stored_bytes": it.stored_bytes, "captured": it.captured,
                "in_dirty_store": it.in_dirty_store, "behind_s": it.behind_s,
                "epochs": it.epochs,
            })
        })
        .collect();
    let all = json!({
        "memory_mib": plan.memory_mib, "bytes_a_second": plan.speed, "epoch": plan.epoch,
        "after_s": plan.after.as_secs(), "checkpoints": list,
    });
    std::fs::write(&plan.out, serde_json::to_string_pretty(&all)?)?;
    Ok(())
}

pub fn print(columns: &[Column]) {
    println!(
        "\n| | | total | longest pause | restart | lazy | stored | pause, times QEMU's | total | restart |"
    );
    println!("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    for Column { method, section, figures: it } in columns {
        let peer = columns
            .iter()
            .find(|other| other.section == *section && other.method.starts_with("qemu"))
            .map_or_else(Figures::default, |other| other.figures.clone());
        println!(
            "| {section} | {method} | {:.1} s | {:.0} ms | {:.1} s | {} | {} MB | {:.3} | {:.2} | {:.2} |",
            it.total_s,
            it.longest_pause_ms,
            it.restart_s,
            it.lazy_restart_s.map_or("-".to_owned(), |lazy| format!("{lazy:.1} s")),
            it.stored_bytes / 1_000_000,
            it.longest_pause_ms / peer.longest_pause_ms,
            it.total_s / peer.total_s,
            it.restart_s / peer.restart_s,
        );
    }
    println!(
        "\n| | | bulk pass | skipped | to the dirty store | spread there | of all there in the end | copied in the pause | pause by its own clock | behind | epochs | most in one |"
    );
    println!("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    for Column { method, section, figures: it } in columns {
        let Some(epochs) = it.epochs.as_array() else { continue };
        let most = epochs.iter().filter_map(|epoch| epoch["dirty_pages"].as_u64()).max();
        println!(
            "| {section} | {method} | {} | {} | {} | {} | {} | {} | {:.1} ms | {:.1} s | {} | {} |",
            it.captured["bulk"],
            it.captured["skipped"],
            it.captured["dirty_store"],
            it.captured["spread"],
            it.in_dirty_store.unwrap_or(0),
            it.captured["stopped"],
            it.own_pause_ms.unwrap_or(0.0),
            it.behind_s.unwrap_or(0.0),
            epochs.len(),
            most.unwrap_or(0),
        );
    }
}
