//! What is to be hashed when.

/// Jobs a second.
pub const RATE: f64 = 30.0;
/// The time that a job has, in milliseconds.
pub const PERIOD_MS: f64 = 1000.0 / RATE;
/// The most of a CPU that the jobs shall need.
const NEARLY_FULL: f64 = 0.78;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadKind {
    /// The paper's: the block grows step by step.
    Ramp,
    /// A step up and one down.
    Steps,
    /// As of a film: large frames among small ones, and scenes.
    Film,
    /// A steady one, without hogs.
    Quiet,
    /// The same while Dewar takes checkpoints of another guest.
    Checkpoints,
    /// The same while Dewar takes checkpoints of the guest itself.
    Own,
}

/// What a job takes of a CPU's time: so much for each megabyte, and beside the hash what a
/// guest's vCPU does for its kernel.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cost {
    pub ms_per_mb: f64,
    pub ms_beside: f64,
}

#[derive(Debug, Clone)]
pub struct Load {
    pub kind: LoadKind,
    /// Seconds and bytes.
    pub steps: Vec<(f64, u64)>,
    /// CPU time of the largest job and of the mean, in milliseconds, as estimated.
    pub peak_ms: f64,
    pub mean_ms: f64,
}

impl LoadKind {
    pub const ALL: [Self; 6] =
        [Self::Ramp, Self::Steps, Self::Film, Self::Quiet, Self::Checkpoints, Self::Own];

    /// Whether programs run beside it that take all CPU time.
    pub fn has_hogs(self) -> bool {
        !matches!(self, Self::Quiet | Self::Checkpoints | Self::Own)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Ramp => "ramp",
            Self::Steps => "steps",
            Self::Film => "film",
            Self::Quiet => "quiet",
            Self::Checkpoints => "checkpoints",
            Self::Own => "own",
        }
    }
}

impl Load {
    pub fn new(kind: LoadKind, Cost { ms_per_mb, ms_beside }: Cost) -> Self {
        let full = (NEARLY_FULL * PERIOD_MS - ms_beside) / ms_per_mb;
        let bytes = |mb: f64| (mb * 1e6) as u64;
        let steps = match kind {
            LoadKind::Ramp => {
                // 0.2 MB a step, as the paper. Who hashes so fast that this would be some
                // 1 % of a CPU has the steps of a CPU a fifth as fast.
                let step = if full > 30.0 * 0.2 { 1.0 } else { 0.2 };
                let count = (full / step).floor().max(2.0) as u64;
                (1..=count).map(|nth| (3.0, bytes(step * nth as f64))).collect()
            }
            LoadKind::Steps => {
                let (low, high) = (bytes(0.3 * full), bytes(0.8 * full));
                vec![(3.0, low), (4.0, high), (4.0, low), (3.0, high)]
            }
            LoadKind::Quiet | LoadKind::Checkpoints | LoadKind::Own => {
                vec![(15.0, bytes(0.6 * full))]
            }
            LoadKind::Film => film(full).into_iter().map(|mb| (1.0 / RATE, bytes(mb))).collect(),
        };
        let total: f64 = steps.iter().map(|(seconds, _)| seconds).sum();
        let mean =
            steps.iter().map(|(seconds, bytes)| seconds * *bytes as f64).sum::<f64>() / total;
        let peak = steps.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        let ms = |bytes: f64| bytes / 1e6 * ms_per_mb + ms_beside;
        Self { kind, steps, peak_ms: ms(peak as f64), mean_ms: ms(mean) }
    }

    /// How long it lasts, in seconds.
    pub fn seconds(&self) -> f64 {
        self.steps.iter().map(|(seconds, _)| seconds).sum()
    }
}

/// Twenty seconds of frames: every twelfth is large, every third middling, scenes of
/// one to four seconds differ, and each frame a little; the same each time.
fn film(full: f64) -> Vec<f64> {
    let mut state = 20_061_107_u64;
    let mut random = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    let mut frames = Vec::new();
    while frames.len() < 600 {
        let scene = 0.45 + 0.45 * random();
        for frame in 0..(30.0 + 90.0 * random()) as u64 {
            let kind = match frame % 12 {
                0 => 1.0,
                3 | 6 | 9 => 0.65,
                _ => 0.4,
            };
            frames.push(full * scene * kind * (0.9 + 0.2 * random()).min(1.1));
        }
    }
    frames.truncate(600);
    frames
}
